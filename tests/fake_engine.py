"""An engine core that says what a test wants: the engine's end of the socket, in a thread, without scheduler or model.

A script decides per request what comes out and how fast. What it was told is kept for the test to look at.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.protocol import codec
from octavo.protocol.engine_messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    BeamOutput,
    EngineOutput,
    EngineReady,
    EngineStats,
    ErrorCode,
    FinishReason,
    RequestOutput,
)
from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs
from octavo.protocol.sampling_params import NO_LOGPROBS
from octavo.protocol.transport import Listener, wait_readable

POLL_S = 0.001
BLOCKS_PER_REQUEST = 4
NUM_BLOCKS = 1000


@dataclass
class Script:
    """What one request gets.

    Attributes:
        token_ids: the output; a request whose max_tokens is less ends there with LENGTH.
        finish_reason: how it ends after the last of them; None: it never does.
        tokens_per_output: tokens in one message.
        interval_s: pause before each message.
        num_cached_tokens: what the first output says; later ones say `num_cached_tokens_later` if it is not None.
        beams: what the last output carries.
        repeats: each message also carries this many tokens that came before.
        gap_at: index at which one token is left out.
        prompt_rows_per_output: logprobs of the prompt in one message; all of them come before the first token. With 0
            none ever come.
    """

    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = FinishReason.LENGTH
    stop_token_id: int | None = None
    tokens_per_output: int = 1
    interval_s: float = 0.0
    error: ErrorCode | None = None
    error_message: str = ""
    num_cached_tokens: int = 0
    num_cached_tokens_later: int | None = None
    beams: Sequence[BeamOutput] = ()
    repeats: int = 0
    gap_at: int | None = None
    prompt_rows_per_output: int = 1_000_000


def logprob_at(place: int) -> float:
    """The logprob that a token has at a place in its prompt or output; a number that fp32 has exactly."""
    return -(place % 7 + 1) / 8


def logprob_rows(token_ids: Sequence[int], first_place: int, num_listed: int) -> TokenLogprobs:
    """A row for each token: it is the likeliest, and the next ids follow, each a step of 1 less likely."""
    ids, values = array("i"), array("f")
    for place, token_id in enumerate(token_ids, first_place):
        ids.extend([token_id, *range(token_id, token_id + num_listed)])
        values.extend([logprob_at(place), *(logprob_at(place) - step for step in range(num_listed))])
    return TokenLogprobs(num_listed, ids.tobytes(), values.tobytes())


@dataclass
class Running:
    request: AddRequest
    script: Script
    num_sent: int = 0
    num_prompt_rows_sent: int = 0
    due_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.limit = self.request.sampling_params.max_tokens
        self.token_ids = list(self.script.token_ids[: self.limit])

    def next_prompt_logprobs(self) -> PromptLogprobs | None:
        """More logprobs of the prompt; None when all are sent or nobody asked."""
        first, prompt = 1 + self.num_prompt_rows_sent, self.request.prompt_token_ids
        num_listed = self.request.sampling_params.num_prompt_logprobs
        if num_listed == NO_LOGPROBS or first >= len(prompt) or not self.script.prompt_rows_per_output:
            return None
        end = min(len(prompt), first + self.script.prompt_rows_per_output)
        self.num_prompt_rows_sent = end - 1
        return PromptLogprobs(first, logprob_rows(prompt[first:end], first, num_listed))

    def next_output(self) -> RequestOutput:
        prompt_logprobs = self.next_prompt_logprobs()
        if prompt_logprobs is not None and 1 + self.num_prompt_rows_sent < len(self.request.prompt_token_ids):
            return RequestOutput(self.request.request_id, 0, [], prompt_logprobs=prompt_logprobs)
        token_ids, limit = self.token_ids, self.limit
        first = self.num_sent
        num_cached_tokens = self.script.num_cached_tokens
        if first and self.script.num_cached_tokens_later is not None:
            num_cached_tokens = self.script.num_cached_tokens_later
        self.num_sent = min(len(token_ids), first + self.script.tokens_per_output)
        is_last = self.num_sent == len(token_ids)
        reason = self.script.finish_reason if is_last else None
        if reason is FinishReason.STOP and len(self.script.token_ids) > limit:
            reason = FinishReason.LENGTH
        first_index = max(0, first - self.script.repeats)
        new_token_ids = token_ids[first_index : self.num_sent]
        if self.script.gap_at == first:
            first_index, new_token_ids = first_index + 1, new_token_ids[1:]
        num_listed = self.request.sampling_params.num_logprobs
        has_logprobs = num_listed != NO_LOGPROBS
        return RequestOutput(
            self.request.request_id,
            first_index,
            new_token_ids,
            reason,
            self.script.stop_token_id if reason is FinishReason.STOP else None,
            num_cached_tokens,
            self.script.error if is_last else None,
            self.script.error_message if is_last else "",
            [*self.script.beams] if is_last else [],
            logprob_rows(new_token_ids, first_index, num_listed) if has_logprobs else None,
            prompt_logprobs,
        )


class FakeEngine:
    """A context manager; the thread ends with it."""

    def __init__(
        self, address: str, script: Callable[[AddRequest], Script], is_ready: bool = True, step_s: float = 0.0
    ) -> None:
        """`is_ready` false: answers Hello only once `become_ready` is called. `step_s`: least time of one step."""
        self.script = script
        self.step_s = step_s
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.running: dict[str, Running] = {}
        self._address = address
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._peers: dict[str, bytes] = {}
        self._unanswered: list[bytes] = []
        self._frames: list[tuple[bytes, bytes]] = []
        self._next_step_s = 0.0
        self._thread = threading.Thread(target=self._run, name="fake engine")
        if is_ready:
            self._ready.set()

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._ended.set()
        self._thread.join()

    def become_ready(self) -> None:
        self._ready.set()

    def send_raw(self, frame: bytes) -> None:
        """Send `frame`, whatever it is, to every API server that has a request."""
        self._frames += [(peer, frame) for peer in set(self._peers.values())]

    def _run(self) -> None:
        listener = Listener(self._address)
        try:
            while not self._ended.is_set():
                wait_readable([listener], 0.0 if self.running else POLL_S)
                while (received := listener.receive()) is not None:
                    self._handle(listener, *received)
                if self._ready.is_set():
                    for peer in self._unanswered:
                        listener.send(peer, codec.encode(EngineReady(PROTOCOL_VERSION, 16, NUM_BLOCKS, 2048)))
                    self._unanswered.clear()
                while self._frames:
                    listener.send(*self._frames.pop())
                self._step(listener)
        finally:
            listener.close()

    def _handle(self, listener: Listener, peer: bytes, frame: bytes) -> None:
        match codec.decode_engine_command(frame):
            case AddRequest() as request:
                self.added.append(request)
                self._peers[request.request_id] = peer
                script = self.script(request)
                running = Running(request, script)
                running.due_s += script.interval_s
                self.running[request.request_id] = running
            case AbortRequests(request_ids):
                self.aborted += request_ids
                for request_id in request_ids:
                    self.running.pop(request_id, None)
                self._send(listener, {peer: []})
            case _:
                self._unanswered.append(peer)

    def _step(self, listener: Listener) -> None:
        now_s = time.monotonic()
        if now_s < self._next_step_s:
            time.sleep(min(POLL_S, self._next_step_s - now_s))
            return
        self._next_step_s = max(now_s - 0.1, self._next_step_s + self.step_s)
        outputs: dict[bytes, list[RequestOutput]] = {}
        is_held = True
        for running in list(self.running.values()):
            if now_s < running.due_s:
                continue
            if running.script.finish_reason is None and running.num_sent >= len(running.script.token_ids):
                continue
            is_held = False
            running.due_s = now_s + running.script.interval_s
            output = running.next_output()
            outputs.setdefault(self._peers[output.request_id], []).append(output)
            if output.finish_reason is not None:
                del self.running[output.request_id]
        self._send(listener, outputs)
        if is_held:
            time.sleep(POLL_S)

    def _send(self, listener: Listener, outputs: dict[bytes, list[RequestOutput]]) -> None:
        num_running = len(self.running)
        stats = EngineStats(num_running, 0, num_running * BLOCKS_PER_REQUEST, NUM_BLOCKS, 0, 0, 0)
        for peer, each in outputs.items():
            frame = codec.encode(EngineOutput(each, stats))
            while not listener.send(peer, frame) and not self._ended.is_set():
                time.sleep(POLL_S)
