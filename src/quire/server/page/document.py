"""The page's files, as they are sent: HTML, styles and ES modules.

Knows files and the browser's rules on what a page may do. The files are the same for every client and contain no data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

WEB = Path(__file__).parent / "web"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; media-src blob:;"
    " base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content-Security-Policy. Only files of this server run, no text becomes markup, and nothing is sent elsewhere. A blob is a file
that the reader gave to the page."""


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """URL path -> file. Read at the first request; a path that is not in it is never opened."""
    files = {}
    for path in sorted(WEB.iterdir()):
        if path.suffix in KINDS:
            body = path.read_bytes()
            etag = f'"{sha256(body).hexdigest()[:20]}"'
            files[url_path(path.name)] = PageFile(body, KINDS[path.suffix], etag)
    return files


def url_path(name: str) -> str:
    return "/" if name == "index.html" else f"/ui/page/{name}"


def page_paths() -> frozenset[str]:
    """The URL paths of the page's files. They need no key."""
    return frozenset(url_path(path.name) for path in WEB.iterdir() if path.suffix in KINDS)
