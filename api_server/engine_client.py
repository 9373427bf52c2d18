"""The API server's side of the border to the engine core: the log of every live request.

A `Generation` is what one HTTP request asks for: one request of the engine core per choice. The client keeps for each
its AddRequest and its output so far, appends what is next, drops what it has already, and hands the consumer all that
is new at once; a slow consumer costs no queue, because what waits for it is the log itself. Invariant: every request
ends exactly once, by the engine core's finish or by our abort, and is counted then. Rejected: a queue and a task per
choice, which cost more per token than the work that is done with the token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec

from octavo.api_server.errors import ApiError, from_engine, internal_error
from octavo.api_server.metrics import Metrics
from octavo.protocol import codec
from octavo.protocol.engine_messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    EngineOutput,
    EngineReady,
    FinishReason,
    Hello,
    RequestOutput,
)
from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs
from octavo.protocol.transport import AsyncConnection

logger = logging.getLogger(__name__)


class LiveRequest:
    """The log of one request: all that the engine core needs to go on with it, and what to tell the client.

    `num_cached_tokens` is what its first output said, None before. A request that is sent again finds other blocks,
    but the client pays for what the first computation found. `logprobs` are those of the tokens that were not taken.
    """

    __slots__ = ("ending", "first_output_s", "generation", "index", "is_changed", "last_output_s", "logprobs",
                 "num_cached_tokens", "num_prompt_rows", "num_taken", "output_token_ids", "prompt_logprobs",
                 "request")  # fmt: skip

    def __init__(self, request: AddRequest, generation: Generation, index: int) -> None:
        self.request = request
        self.generation = generation
        self.index = index
        self.output_token_ids: list[int] = []
        self.num_taken = 0
        self.is_changed = False
        self.first_output_s = 0.0
        self.last_output_s = 0.0
        self.num_cached_tokens: int | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_prompt_rows = 0
        self.ending: RequestOutput | None = None

    def add_prompt_logprobs(self, found: PromptLogprobs) -> int:
        """Append what is new; return how many rows are missing before it, in which case nothing is appended."""
        num_known = 1 + self.num_prompt_rows - found.first_position
        if num_known >= 0 and found.rows.num_rows > num_known:
            self.prompt_logprobs.append(found.rows.tail(num_known) if num_known else found.rows)
            self.num_prompt_rows += found.rows.num_rows - num_known
        return max(0, -num_known)

    def take(self) -> Update:
        """Return what came since the last call."""
        token_ids = self.output_token_ids[self.num_taken :]
        self.num_taken = len(self.output_token_ids)
        self.is_changed = False
        logprobs, self.logprobs = self.logprobs, []
        return Update(self.index, token_ids, self.ending, logprobs)


class Update(msgspec.Struct, gc=False):
    """New output of choice `index`; `ending` is the engine core's last word on it, `logprobs` have a row per token."""

    index: int
    token_ids: list[int]
    ending: RequestOutput | None
    logprobs: Sequence[TokenLogprobs] = ()

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.ending is None else self.ending.finish_reason

    @property
    def stop_token_id(self) -> int | None:
        return None if self.ending is None else self.ending.stop_token_id


class Generation:
    """The live requests of one HTTP request; leaving it aborts those that still run.

    `on_start` is called with the index of a request when its first output is there, or its ending without any.
    """

    def __init__(self, client: EngineClient, requests: Sequence[AddRequest], on_start: Callable[[int], None]) -> None:
        self.client = client
        self.on_start = on_start
        self.live_requests = [LiveRequest(request, self, index) for index, request in enumerate(requests)]
        self._changed: list[LiveRequest] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        self._failure: ApiError | None = None

    def __enter__(self) -> Generation:
        self.client.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        has_failed = self._failure is not None or isinstance(value, Exception)
        self.client.leave(self, "error" if has_failed else "abort")

    async def updates(self) -> list[Update]:
        """Wait for new output and return it, one Update per changed choice; empty after `wake`.

        Raises ApiError when a choice failed or `fail` was called.
        """
        while not self._changed and self._failure is None and not self._is_woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_woken = False
        if self._failure is not None:
            raise self._failure
        changed, self._changed = self._changed, []
        return [live.take() for live in changed]

    def stop(self, index: int) -> None:
        """End choice `index`, whose text is complete because of a stop string."""
        self.client.end(self.live_requests[index], FinishReason.STOP)

    def fail(self, error: ApiError) -> None:
        """Have the consumer raise `error`."""
        if self._failure is None:
            self._failure = error
        self._wake_consumer()

    def wake(self) -> None:
        """Have the consumer's `updates` return, with nothing if nothing is new."""
        self._is_woken = True
        self._wake_consumer()

    def note_change(self, live: LiveRequest) -> None:
        """Called by the client when `live` has new output or its ending."""
        ending = live.ending
        if ending is not None and ending.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.fail(from_engine(ending))
            return
        if not live.is_changed:
            live.is_changed = True
            self._changed.append(live)
        self._wake_consumer()

    def _wake_consumer(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One connection to the engine core."""

    def __init__(self, address: str, name: str, metrics: Metrics) -> None:
        self.metrics = metrics
        self.engine_ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._connection = AsyncConnection(address, name)
        self._live: dict[str, LiveRequest] = {}
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()  # bounded by admission
        self._send(Hello())

    def close(self) -> None:
        self._connection.close()

    def generate(self, requests: Sequence[AddRequest], on_start: Callable[[int], None]) -> Generation:
        """Return a context manager in which `requests` run; their ids must be new."""
        return Generation(self, requests, on_start)

    def fail_all(self, error: ApiError) -> None:
        """End everything that is live with `error`."""
        for generation in {live.generation for live in self._live.values()}:
            generation.fail(error)

    def add(self, generation: Generation) -> None:
        for live in generation.live_requests:
            self._live[live.request.request_id] = live
            self._send(live.request)

    def leave(self, generation: Generation, reason: str) -> None:
        """Abort what still runs; `reason` is what the metrics call it."""
        running = [live.request.request_id for live in generation.live_requests if self._forget(live)]
        if running:
            self.metrics.finished[reason] += len(running)
            self._send(AbortRequests(running))

    def end(self, live: LiveRequest, reason: FinishReason) -> None:
        """Abort `live`, which ended for our own reason, if the engine core has not ended it already."""
        if self._forget(live):
            self._count_end(live, reason)
            self._send(AbortRequests([live.request.request_id]))

    async def send_forever(self) -> None:
        """Send what the outbox holds, in its order."""
        while True:
            await self._connection.send(await self._outbox.get())

    async def receive_forever(self) -> None:
        """Apply what the engine core sends; a frame that is none is counted and dropped."""
        while True:
            frame = await self._connection.receive()
            try:
                event = codec.decode_engine_event(frame)
            except msgspec.MsgspecError:
                self.metrics.num_bad_frames += 1
                logger.warning("dropped a frame of %d bytes that is no message", len(frame))
                continue
            if isinstance(event, EngineOutput):
                self._apply(event)
            else:
                self._note_ready(event)
            await asyncio.sleep(0)  # a full socket never makes receive wait, so the consumers get their turn here

    def _note_ready(self, ready: EngineReady) -> None:
        if ready.protocol_version != PROTOCOL_VERSION:
            raise RuntimeError(f"the engine core speaks protocol {ready.protocol_version}, not {PROTOCOL_VERSION}")
        if not self.engine_ready.done():
            self.engine_ready.set_result(ready)

    def _apply(self, event: EngineOutput) -> None:
        now_s = time.monotonic()
        self.metrics.stats = event.stats
        for output in event.outputs:
            live = self._live.get(output.request_id)
            if live is not None:  # else we aborted it while this was under way
                self._append(live, output, now_s)

    def _append(self, live: LiveRequest, output: RequestOutput, now_s: float) -> None:
        num_known = len(live.output_token_ids) - output.first_index
        num_missing = max(0, -num_known)
        if output.prompt_logprobs is not None:
            num_missing += live.add_prompt_logprobs(output.prompt_logprobs)
        if num_missing:
            logger.error("output of request %s has a gap of %d tokens", output.request_id, num_missing)
            live.generation.fail(internal_error())
            return
        if live.num_cached_tokens is None:
            live.num_cached_tokens = output.num_cached_tokens
            live.generation.on_start(live.index)
        new_token_ids = output.token_ids[num_known:] if num_known else output.token_ids
        if num_new_tokens := len(new_token_ids) + sum(len(beam.token_ids) for beam in output.beams):
            self._count_tokens(live, num_new_tokens, now_s)
            live.output_token_ids += new_token_ids
            if output.logprobs is not None:
                live.logprobs.append(output.logprobs.tail(num_known) if num_known else output.logprobs)
        if output.finish_reason is not None:
            live.ending = output
            self._forget(live)
            self._count_end(live, output.finish_reason)
        elif not new_token_ids:
            return
        live.generation.note_change(live)

    def _count_tokens(self, live: LiveRequest, num_tokens: int, now_s: float) -> None:
        metrics = self.metrics
        if live.output_token_ids:
            metrics.inter_token.observe(now_s - live.last_output_s)
        else:
            live.first_output_s = now_s
            metrics.time_to_first_token.observe(now_s - live.request.arrival_time_s)
            if live.request.sampling_params.choice_index == 0:  # all choices of a prompt share it
                metrics.num_prompt_tokens += len(live.request.prompt_token_ids)
        live.last_output_s = now_s
        metrics.num_generation_tokens += num_tokens

    def _count_end(self, live: LiveRequest, reason: FinishReason) -> None:
        metrics = self.metrics
        metrics.finished[reason.value] += 1
        num_later_tokens = len(live.output_token_ids) - 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and live.first_output_s:
            metrics.end_to_end.observe(live.last_output_s - live.request.arrival_time_s)
            if num_later_tokens > 0:
                seconds = live.last_output_s - live.first_output_s
                metrics.time_per_output_token.observe(seconds / num_later_tokens)

    def _forget(self, live: LiveRequest) -> bool:
        """Take `live` out of the living; False when it had ended already."""
        return self._live.pop(live.request.request_id, None) is not None

    def _send(self, command: Hello | AddRequest | AbortRequests) -> None:
        self._outbox.put_nowait(codec.encode(command))
