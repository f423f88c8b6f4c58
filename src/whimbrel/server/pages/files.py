"""Files of the pages, with the headers under which browsers run them.

The pages load nothing but files of this folder and talk to nothing but this server, which the policy holds them to. They
use relative URLs, so that they work under a proxy's prefix.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

PLAYGROUND: Final = "playground.html"
HTML: Final = "text/html"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content-Security-Policy: no inline script or style, nothing from elsewhere, no HTML made of strings."""
_TYPES: Final = {".html": HTML, ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    headers: dict[str, str]


@cache
def page_files() -> dict[str, PageFile]:
    paths = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in _TYPES)
    return {path.name: page_file(path.read_bytes(), _TYPES[path.suffix]) for path in paths}


def page_file(content: bytes, media_type: str) -> PageFile:
    headers = {
        "content-type": f"{media_type}; charset=utf-8",
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # browsers ask each time, so a new release is never mixed with an old one
        "etag": f'"{sha256(content).hexdigest()[:32]}"',
    }
    return PageFile(content, headers)


ASSET_PATHS: Final = {f"/assets/{name}": name for name in page_files() if name != PLAYGROUND}
"""Names of scripts, styles and pictures by their paths."""
