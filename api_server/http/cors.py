"""Web pages of other origins as clients: which may use the server, and how their browsers are told.

A browser asks before it sends a page's request to another origin (the preflight), and keeps the answer from a page
that its headers do not name. Without `--cors-origins` nobody is named: a page from anywhere cannot use a server that
only its user's machine can reach. Keys are sent as headers by the page, never by the browser on its own, so
credentials are not allowed. Invariant: a preflight of a named origin is all that is answered without an API key, and
the answer says nothing but that.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web

ANY_ORIGIN = "*"
METHODS = "GET, POST"
EXPOSED_HEADERS = "X-Request-Id, Retry-After"
MAX_AGE_S = 600
HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{0,2048}")  # what a page may want to send; SDKs have dozens of their own


class Cors:
    """The rule of one server."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins` are named as browsers do, such as `https://chat.example`; ANY_ORIGIN is everybody."""
        self.origins = frozenset(origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """Return the answer to a preflight that is allowed; None for every other request."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if not self._is_allowed(request) or not HEADER_NAMES.fullmatch(asked):
            return None
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if asked:
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    def headers(self, request: web.Request) -> dict[str, str]:
        """Return what every answer to `request` says to a browser; nothing when no origin is allowed."""
        if not self.origins:
            return {}
        if not self._is_allowed(request):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": request.headers["Origin"],
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
        }

    def _is_allowed(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and (ANY_ORIGIN in self.origins or origin in self.origins)
