"""Hooks of MkDocs for this site.

Pages may link to files of the repository outside ``docs/``, as they do on a code host. Each such file becomes
part of the site, below ``repository/``, and its link is rewritten. MkDocs then checks it like any other link,
so one to a file that does not exist fails the strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from envscaler_airflow.cli import main

FOLDER = "repository"
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]*)")


def on_startup(**_kwargs: object) -> None:
    """Import every command: mkdocs-click reads ``commands``, which has stand-ins for those not used yet."""
    for name in list(main.commands):
        main.get_command(click.Context(main), name)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` that pages link to."""
    docs = Path(config.docs_dir)
    for page in list(files.documentation_pages()):
        for target in LINK.findall(page.content_string):
            outside = _outside(page.src_uri, target)
            if outside is None or not (docs.parent / outside).is_file():
                continue
            name = f"{FOLDER}/{outside}"
            if files.get_file_from_path(name) is None:
                # A Markdown file out there has links of its own: it is shown as it is.
                content = (docs.parent / outside).read_bytes()
                files.append(File.generated(config, f"{name}.txt", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to those files to their copies."""
    del config, files
    source = page.file.src_uri

    def rewritten(found: re.Match[str]) -> str:
        outside = _outside(source, found[1])
        if outside is None:
            return found[1]
        start = PurePosixPath(source).parent.as_posix()
        return os.path.relpath(f"{FOLDER}/{outside}.txt", start)

    return LINK.sub(rewritten, markdown)


def _outside(source: str, target: str) -> str | None:
    """Path, from the repository's root, of *target* in page *source*; None inside ``docs/``."""
    path = os.path.normpath(PurePosixPath("docs", source).parent / target)
    return None if path.startswith(("docs/", "..")) else path
