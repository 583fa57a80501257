"""The page at /, where people chat with the model and watch the server: its files, as they are in ``web/``.

The files are open to everybody and contain no secret. The requests of the page need the key, for which it asks its
user.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from fenceline.entrypoints.access import for_anybody

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# The file behind each path.
_FILES = {
    "/": "index.html",
    **{
        f"/web/{name}": name
        for name in (
            "style.css", "icon.svg", "app.js", "api.js", "chat.js", "copy.js", "images.js", "markdown.js",
            "server.js", "timeline.js",
        )
    },
}  # fmt: skip
PAGE_PATHS = frozenset(_FILES)
_HEADERS = {
    # Nothing from other sites, nothing inline: if a text of the model became markup by mistake, it could do nothing.
    # Only images may be data: the page shows those that a person adds.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Another version of the server may be here the next time; the files fit together only within one.
    "Cache-Control": "no-cache",
}


# What of index.html is another where the model embeds: no chat, and a line that says what there is instead.
_OF_AN_EMBEDDER = {
    b'<body data-pane="chat">': b'<body data-pane="server">',
    b'<section id="chat" ': b'<section id="chat" hidden ',
    b"<nav ": b"<nav hidden ",
    b'<p id="embeds" hidden ': b'<p id="embeds" ',
}


def install_web_page(app: FastAPI, embeds: bool) -> None:
    """Serve the files, which are read once. A browser that has a file's current version gets a 304. ``embeds``: the
    server computes embeddings, so there is nobody to chat with."""
    folder = files("fenceline.entrypoints").joinpath("web")
    for path, name in _FILES.items():
        content = folder.joinpath(name).read_bytes()
        for of_a_chat, instead in _OF_AN_EMBEDDER.items() if embeds and path == "/" else ():
            assert content.count(of_a_chat) == 1
            content = content.replace(of_a_chat, instead)
        app.add_route(path, _handler(name, content), methods=["GET"], include_in_schema=False)


def _handler(name: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "ETag": etag}
    kind = _KINDS[name.rpartition(".")[2]]

    @for_anybody
    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return serve
