"""The page as one document: its HTML with its style and its script inside.

Knows files and the browser's rules on what a page may do. The document is the same for every client and contains no
data, so its policy can name its script and style by hash, and no other script can run.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

SCRIPTS = ("base.js", "markdown.js", "stream.js", "chat.js", "draw.js", "live.js")


@dataclass(frozen=True, slots=True)
class Document:
    body: bytes
    etag: str
    policy: str
    """Content-Security-Policy."""


@cache
def document() -> Document:
    """Read at the first request."""
    here = Path(__file__).parent
    style = (here / "style.css").read_text(encoding="utf-8")
    # One module: the files share names, and none is global.
    script = "\n".join((here / name).read_text(encoding="utf-8") for name in SCRIPTS)
    html = (here / "index.html").read_text(encoding="utf-8")
    html = html.replace("/*style*/", style, 1).replace("/*script*/", script, 1)
    body = html.encode()
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Document(body, f'"{sha256(body).hexdigest()[:20]}"', policy)


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode()
