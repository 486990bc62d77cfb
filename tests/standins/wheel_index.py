"""A package index on loopback: a folder of wheels, with or without a password, with or without TLS."""

from __future__ import annotations

import base64
import http.server
import socket
import ssl
import threading
import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, text: str) -> Path:
    """A package of one module, *name*, whose ``text`` is *text*."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"text = {text!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """Serves ``/simple/NAME/`` and the wheels of *folder*."""

    def __init__(
        self, folder: Path, *, password: str | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        """Start to serve on a free port of 127.0.0.1."""
        wanted = None if password is None else "Basic " + base64.b64encode(password.encode()).decode()

        class Handler(http.server.BaseHTTPRequestHandler):
            disable_nagle_algorithm = True  # else the body waits 40 ms for the confirmation of the headers

            def do_GET(self) -> None:
                if wanted is not None and self.headers.get("Authorization") != wanted:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", "Basic")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                parts = self.path.strip("/").split("/")
                wheel = folder / parts[-1]
                if len(parts) == 2 and parts[0] == "simple":
                    names = sorted(path.name for path in folder.glob(f"{parts[1].replace('-', '_')}-*.whl"))
                    links = "".join(f'<a href="/files/{name}">{name}</a>' for name in names)
                    self.answer(f"<html><body>{links}</body></html>".encode() if names else None, "text/html")
                else:
                    self.answer(wheel.read_bytes() if wheel.is_file() else None, "application/octet-stream")

            def do_HEAD(self) -> None:
                self.do_GET()

            def answer(self, body: bytes | None, kind: str) -> None:
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body or b"")

            def log_message(self, *_words: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Its address."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Its index by http."""
        return f"http://127.0.0.1:{self.port}/simple"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class Proxy:
    """A proxy that leads every CONNECT to one port of 127.0.0.1, like one that inspects TLS."""

    def __init__(self, port: int) -> None:
        """Start on a free port."""
        self.asked: list[str] = []
        self._to = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """For HTTPS_PROXY."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (data := client.recv(4096)):
            head += data
        self.asked.append(head.split(b"\r\n")[0].decode())
        server = socket.create_connection(("127.0.0.1", self._to))
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        threading.Thread(target=self._pipe, args=(client, server), daemon=True).start()
        self._pipe(server, client)

    @staticmethod
    def _pipe(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()
