"""What surrounds every handler: request id, caller, errors in the shape of the route's API, counting.

Invariant: every answer, whatever went wrong, is one of the catalogue's or a handler's, carries an X-Request-Id, and is
counted by its route's template. With API keys everything but the probes, the metrics and allowed preflights needs one,
whatever the path is and whether there is a route for it, before any of the body is read. Without keys a server on
loopback answers only to names of loopback, so that a web page whose name was pointed at 127.0.0.1 cannot use it.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar

from aiohttp import web

from octavo.api_server.api_keys import CALLER, NOBODY, ApiKeys
from octavo.api_server.errors import ApiError, ErrorKind, ErrorShape, internal_error
from octavo.api_server.health import ServerState
from octavo.api_server.http.cors import Cors
from octavo.api_server.metrics import Metrics
from octavo.protocol.config import EngineConfig

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST_ID: ContextVar[str] = ContextVar("request_id")
GOOD_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
STATUS_CLIENT_LEFT = 499  # nginx's number; only in metrics and the log
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})  # as they come, with no query
OPEN_METHODS = frozenset({"GET", "HEAD"})
HTTP_ERRORS = {
    404: (ErrorKind.ROUTE_NOT_FOUND, "there is nothing at this path"),
    405: (ErrorKind.METHOD_NOT_ALLOWED, "this path does not take this method"),
}


class Surroundings:
    """The middleware around every handler."""

    def __init__(
        self,
        config: EngineConfig,
        state: ServerState,
        metrics: Metrics,
        api_keys: ApiKeys | None,
        error_shapes: Mapping[str, ErrorShape],
    ) -> None:
        """`error_shapes` is by path; where a path is not in it, errors are OpenAI's."""
        self.state = state
        self.metrics = metrics
        self.api_keys = api_keys
        self.error_shapes = error_shapes
        self.cors = Cors(config.api.cors_origins)
        self.is_on_loopback = is_loopback(config.api.host)
        self.has_log = config.api.log_requests

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        REQUEST_ID.set(_request_id(request))  # each request is handled in a task of its own
        started_s = time.monotonic()
        status = STATUS_CLIENT_LEFT
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            self._note(request, status, time.monotonic() - started_s)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if (preflight := self.cors.preflight(request)) is not None:
                return preflight
            self._check_caller(request)
            return await handler(request)
        except ApiError as error:
            return self._error_response(request, error)
        except web.HTTPException as problem:
            kind, text = HTTP_ERRORS.get(problem.status, (ErrorKind.INVALID_HTTP, "the request is not valid"))
            response = self._error_response(request, ApiError(kind, text))
            if allowed := problem.headers.get("Allow"):
                response.headers["Allow"] = allowed
            return response
        except ConnectionError:  # the client left before its answer
            raise
        except Exception:
            logger.exception("a request failed")
            return self._error_response(request, internal_error())

    def _error_response(self, request: web.Request, error: ApiError) -> web.Response:
        return error_response(error, self.error_shapes.get(request.path, ErrorShape.OPENAI), REQUEST_ID.get())

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every answer has."""
        response.headers["X-Request-Id"] = REQUEST_ID.get("") or _request_id(request)  # aiohttp refused it
        response.headers["Server"] = "octavo"
        response.headers.update(self.cors.headers(request))
        if self.state.is_ending:
            response.force_close()
            response.headers["Connection"] = "close"

    def _check_caller(self, request: web.Request) -> None:
        if self.api_keys is None:
            self._check_host(request)
            return
        headers = request.headers
        tenant = self.api_keys.find(headers.getall("Authorization", []), headers.getall("X-Api-Key", []))
        CALLER.set(tenant or NOBODY)
        if tenant is None and (request.method not in OPEN_METHODS or request.raw_path not in OPEN_PATHS):
            text = "a valid API key is needed, in the header Authorization: Bearer or X-Api-Key"
            raise ApiError(ErrorKind.UNAUTHORIZED, text)

    def _check_host(self, request: web.Request) -> None:
        host = request.headers.get("Host")
        if self.is_on_loopback and host is not None and not is_loopback(_without_port(host)):
            raise ApiError(ErrorKind.HOST_NOT_ALLOWED, "the Host header must be localhost or a loopback address")

    def _note(self, request: web.Request, status: int, duration_s: float) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        self.metrics.count_http(route, request.method, status)
        if self.has_log:
            logger.info("%s %s %d %.3f s %s", request.method, route, status, duration_s, REQUEST_ID.get())


def error_response(error: ApiError, shape: ErrorShape = ErrorShape.OPENAI, request_id: str = "") -> web.Response:
    body = error.render(shape, request_id)
    return web.Response(body=body, status=error.status, headers=error.headers, content_type="application/json")


def is_loopback(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _without_port(host: str) -> str:
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if GOOD_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
