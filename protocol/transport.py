"""Frames between processes: the only file that imports zmq.

One side of each border listens (the engine core), any number of peers connect. Nothing here blocks: a send that cannot
be taken returns False, a receive that has nothing returns None, and `wait_readable` is the one place to wait. Queues
are bounded by `MAX_QUEUED_FRAMES`, so that a stuck peer costs bounded memory. Rejected: PUB/SUB (drops silently),
REQ/REP (a lost peer leaves it stuck), and shared memory (a second mechanism to recover after a crash).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import zmq
import zmq.asyncio

MAX_QUEUED_FRAMES = 100_000
LINGER_MS = 0

Peer = bytes


class Receiver(Protocol):
    """What a worker or the engine core needs of its side of a connection."""

    def receive(self, timeout_s: float | None) -> bytes | None: ...
    def send(self, frame: bytes) -> bool: ...


def _configure(socket: Any) -> None:
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)


class Listener:
    """The bound side of a border: receives from and sends to peers by their names."""

    def __init__(self, address: str) -> None:
        """Bind `address`, an `ipc://` path of at most 107 bytes; raise OSError when that is not possible."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise a frame to an unknown peer vanishes silently
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes over its name
        self.socket.bind(address)

    def receive(self) -> tuple[Peer, bytes] | None:
        """Return the next (peer, frame), or None when nothing is there."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0], parts[-1]

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Queue `frame` for `peer`; False when the peer is gone or its queue is full."""
        try:
            self.socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as problem:
            if problem.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        self.socket.close()


class Connection:
    """A peer's side of a border, for processes without an event loop."""

    def __init__(self, address: str, name: str) -> None:
        """Connect to `address` under `name`; the listener may come later, and may come back after a restart."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.connect(address)

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Return the next frame, waiting up to `timeout_s` (None: for ever); None when the time is over."""
        if not self.socket.poll(None if timeout_s is None else round(timeout_s * 1000)):
            return None
        return self.socket.recv(zmq.NOBLOCK)

    def send(self, frame: bytes) -> bool:
        """Queue `frame`; False when the queue is full."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class AsyncConnection:
    """A peer's side of a border on an asyncio event loop."""

    def __init__(self, address: str, name: str) -> None:
        self.socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.connect(address)

    async def receive(self) -> bytes:
        """Wait for the next frame."""
        frame: bytes = await self.socket.recv()
        return frame

    async def send(self, frame: bytes) -> None:
        """Queue `frame`; waits only when the queue is full."""
        await self.socket.send(frame)

    def close(self) -> None:
        self.socket.close()


class InProcessConnection:
    """One end of an in-memory pair with the methods of Connection, for tests without sockets."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]) -> None:
        self.inbox = inbox
        self.outbox = outbox

    def receive(self, timeout_s: float | None) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, frame: bytes) -> bool:
        self.outbox.append(frame)
        return True

    def close(self) -> None:
        self.inbox.clear()


def in_process_pair() -> tuple[InProcessConnection, InProcessConnection]:
    """Return two connected ends."""
    first: deque[bytes] = deque()
    second: deque[bytes] = deque()
    return InProcessConnection(first, second), InProcessConnection(second, first)


def wait_readable(listeners: Sequence[Listener], timeout_s: float | None) -> None:
    """Return when a listener has a frame or `timeout_s` is over (None: for ever)."""
    poller = zmq.Poller()
    for listener in listeners:
        poller.register(listener.socket, zmq.POLLIN)
    poller.poll(None if timeout_s is None else round(timeout_s * 1000))
