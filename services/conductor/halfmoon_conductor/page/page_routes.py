"""Serve the web page at `/`, from the files of this package.

The page contains no data: it reads all of it from `/debug` and `/v1`, with the API key that these
need. It loads nothing from other sites and has no inline script or style; the headers make browsers
enforce that.
"""

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cache-control": "no-cache",  # revalidated at each use: a new version shows at once
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def page_routes() -> list[Route]:
    """Return the routes of `/` and of each of the page's files below `/page/`."""
    folder = files("halfmoon_conductor.page").joinpath("assets")
    served = {each.name: _Served(each.name, each.read_bytes()) for each in folder.iterdir()}
    routes = [Route(f"/page/{name}", file.answer) for name, file in served.items()]
    return [Route("/", served["index.html"].answer), *routes]


class _Served:
    """One file, kept in memory."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        content_type = _TYPES[name.rpartition(".")[-1]]
        self._headers = _HEADERS | {"etag": etag, "content-type": content_type}

    def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
