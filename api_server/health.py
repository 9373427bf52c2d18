"""What the server says about itself: alive, ready, its version.

`/health` answers 200 while the process runs, because a restart would not help a server that is loading or draining.
`/ready` is 200 only while new requests are welcome, so a load balancer leaves before requests are refused.
"""

from __future__ import annotations

import time
from enum import StrEnum
from importlib.metadata import version

import msgspec
from aiohttp import web

from octavo.api_server.errors import ApiError, ErrorKind, shutting_down


class Phase(StrEnum):
    """STARTING until the engine core is ready; DRAINING still takes requests; REFUSING only finishes them."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    REFUSING = "refusing"


class ServerState:
    """The phase, and since when."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.phase_started_s = time.monotonic()

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_started_s = time.monotonic()

    @property
    def is_ending(self) -> bool:
        return self.phase in (Phase.DRAINING, Phase.REFUSING)

    def check_serving(self) -> None:
        """Raise ApiError (503) before the engine core is ready."""
        if self.phase is Phase.STARTING:
            raise ApiError(ErrorKind.STARTING, "the model is still loading; try again soon")

    def check_accepting(self) -> None:
        """Raise ApiError (503) unless new requests are taken."""
        self.check_serving()
        if self.phase is Phase.REFUSING:
            raise shutting_down()


def json_response(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


class HealthRoutes:
    """Handlers of the probes."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        elapsed_s = round(time.monotonic() - self.state.phase_started_s, 3)
        status = 200 if self.state.phase is Phase.READY else 503
        return json_response({"phase": self.state.phase, "elapsed_s": elapsed_s}, status)

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": version("octavo")})
