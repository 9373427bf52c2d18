"""The life of one API server on its event loop: serve, become ready, drain, end.

Invariant: nothing ends silently. A background task that ends takes the process with it, and a drain leaves no request
without its last word. The order of a drain: `/ready` says no; requests are still taken for the grace, in which load
balancers notice; then they are refused; what runs may finish; what still runs then gets an error. A further DRAIN
command ends grace and patience at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiohttp import web

from octavo.api_server.admission import Admission
from octavo.api_server.api_keys import ApiKeys
from octavo.api_server.app import make_app
from octavo.api_server.engine_client import EngineClient
from octavo.api_server.errors import ApiError, ErrorKind, internal_error, shutting_down
from octavo.api_server.health import Phase, ServerState
from octavo.api_server.http.surroundings import error_response
from octavo.api_server.metrics import Metrics
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import EngineReady

KEEP_ALIVE_TIMEOUT_S = 75.0
CONNECTION_OPTIONS: dict[str, Any] = {
    "access_log": None,  # the middleware has one
    "keepalive_timeout": KEEP_ALIVE_TIMEOUT_S,
    "auto_decompress": False,  # compressed bodies are refused, not inflated
}
LAST_WORD_S = 2.0  # for the errors of a drain to be written
MAX_CONNECTIONS = 4096
QUEUED_KV_MEMORIES = 4  # default bound on waiting prompts: so many times what the KV blocks hold
BACKLOG = 2048
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)

logger = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """aiohttp's protocol, with errors below HTTP rendered like all others."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            response = error_response(ApiError(ErrorKind.INVALID_HTTP, "the request is not valid HTTP"))
        else:
            logger.error("a request failed outside its handler", exc_info=exc)
            response = error_response(ApiError(ErrorKind.INTERNAL, "the server failed on this request"))
        response.force_close()
        return response


class Refusal(asyncio.Protocol):
    """What a connection above the limit gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()


class ApiServer:
    """Everything that one API server consists of; create it on a running event loop."""

    def __init__(self, config: EngineConfig, index: int, tokenizer: Tokenizer, api_keys: ApiKeys | None = None) -> None:
        self.config = config
        self.metrics = Metrics()
        self.state = ServerState()
        self.admission = Admission(config.api.max_queued_requests + config.scheduler.max_num_seqs)
        self.engine = EngineClient(config.engine_address, f"api-{index}", self.metrics)
        self.app = make_app(config, tokenizer, self.engine, self.state, self.admission, self.metrics, api_keys)
        self._drain_asked = asyncio.Event()
        self._is_hurried = asyncio.Event()

    def drain(self) -> None:
        """Begin to drain; called again, let nobody finish."""
        if self._drain_asked.is_set():
            self._is_hurried.set()
        self._drain_asked.set()

    async def run(self, listening_socket: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until a drain is over. Raises what ended a background task."""
        async with self._listen(listening_socket):
            tasks = [
                asyncio.create_task(self.engine.send_forever()),
                asyncio.create_task(self.engine.receive_forever()),
            ]
            life = asyncio.create_task(self._live(on_ready))
            try:
                done, _ = await asyncio.wait([life, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if life not in done:
                    raise RuntimeError("a background task ended")
            except Exception:
                self.engine.fail_all(internal_error())
                raise
            finally:
                for task in (life, *tasks):
                    task.cancel()
        self.engine.close()

    @contextlib.asynccontextmanager
    async def _listen(self, listening_socket: socket.socket) -> AsyncIterator[None]:
        runner = web.AppRunner(self.app, handler_cancellation=True, shutdown_timeout=LAST_WORD_S)
        await runner.setup()
        loop = asyncio.get_running_loop()

        def connect() -> asyncio.Protocol:
            manager = runner.server
            if manager is None or len(manager.connections) >= MAX_CONNECTIONS:
                return Refusal()
            return Connection(manager, loop=loop, **CONNECTION_OPTIONS)

        listener = await loop.create_server(connect, sock=listening_socket, backlog=BACKLOG)
        try:
            yield
        finally:
            listener.close()
            await runner.cleanup()

    async def _live(self, on_ready: Callable[[], None]) -> None:
        asked = asyncio.create_task(self._drain_asked.wait())
        either: list[asyncio.Future[Any]] = [asked, self.engine.engine_ready]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            self._bound_queue(self.engine.engine_ready.result())
            self.state.enter(Phase.READY)
            on_ready()
        await asked
        await self._drain()

    def _bound_queue(self, engine: EngineReady) -> None:
        kv_tokens = engine.num_device_blocks * engine.block_size
        self.admission.max_queued_tokens = self.config.api.max_queued_tokens or QUEUED_KV_MEMORIES * kv_tokens

    async def _drain(self) -> None:
        api = self.config.api
        self.state.enter(Phase.DRAINING)
        await self._wait_unless_hurried(asyncio.sleep(api.drain_grace_s), api.drain_grace_s)
        self.state.enter(Phase.REFUSING)
        await self._wait_unless_hurried(self.admission.idle.wait(), api.drain_timeout_s)
        self.engine.fail_all(shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self.admission.idle.wait()

    async def _wait_unless_hurried(self, condition: Coroutine[Any, Any, object], timeout_s: float) -> None:
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(condition),
            asyncio.create_task(self._is_hurried.wait()),
        ]
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
