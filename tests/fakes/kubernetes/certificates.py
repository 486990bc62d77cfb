"""A self-signed certificate for 127.0.0.1."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificate:
    """Key and certificate in one file, until `close`."""

    def __init__(self) -> None:
        """Create a new one, valid for a day."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake-kubernetes")])
        now = dt.datetime.now(tz=dt.UTC)
        addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        public = made.public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._kept = tempfile.NamedTemporaryFile(suffix=".pem")  # noqa: SIM115 - it lives as long as this
        self._kept.write(secret + public)
        self._kept.flush()
        self.file = self._kept.name
        self.encoded = base64.b64encode(public).decode()

    def close(self) -> None:
        """Remove the file."""
        self._kept.close()
