"""The playground at `/`: a few static files, under headers that let the page reach this server and nothing else.

The page itself holds no secret, so it needs no key; what it asks of the API does.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

ASSETS: dict[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/playground/playground.css": ("playground.css", "text/css; charset=utf-8"),
    "/playground/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/playground/answer.js": ("answer.js", "text/javascript; charset=utf-8"),
    "/playground/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path to file name and media type."""

# No inline code, no text that becomes markup (trusted types), no frame around the page.
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page; `etag` changes with its bytes."""

    content: bytes
    media_type: str
    etag: str

    async def answer(self, request: Request) -> Response:
        """The file, or 304 where the client has these very bytes."""
        headers = {**HEADERS, "etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.media_type})


def read_assets() -> dict[str, Asset]:
    """Every file of the page by its path, as installed."""
    folder = files("ar2diff.serve") / "playground"
    found: dict[str, Asset] = {}
    for path, (name, media_type) in ASSETS.items():
        content = (folder / name).read_bytes()
        found[path] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
