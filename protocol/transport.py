"""Frames between processes: the only file that imports zmq.

One side of each border listens (the engine core), any number of peers connect. Nothing here blocks: a send that cannot
be taken returns False, a receive that has nothing returns None, and `wait_readable` is the one place to wait. Queues
are bounded by `MAX_QUEUED_FRAMES`, so that a stuck peer costs bounded memory. Rejected: PUB/SUB (drops silently),
REQ/REP (a lost peer leaves it stuck), and shared memory (a second mechanism to recover after a crash).

Within a machine the directory of an `ipc://` socket says who may connect. Between machines there is only `tcp://` with
a ClusterKey: each side proves that it has it before a frame passes, and frames are encrypted (CurveZMQ,
rfc.zeromq.org/26). There both sides also send signs of life, so that a machine that vanished is noticed within
`HEARTBEAT_S` + `HEARTBEAT_TIMEOUT_S`, and the end of a connection is an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

MAX_QUEUED_FRAMES = 100_000
LINGER_MS = 0
LAST_WORDS_MS = 1000  # a listener between machines sends for so long what it has still queued when it is closed
HEARTBEAT_S = 3
HEARTBEAT_TIMEOUT_S = 10
CONNECT_TIMEOUT_S = 5  # then another attempt: the first packets to a machine that is starting may be lost
HANDSHAKE_TIMEOUT_S = 10
ZAP_DOMAIN = b"octavo"
MAX_FRAME_BYTES = 64 * 2**20  # from workers to the engine core; before its proof a peer may not even send that

Peer = bytes


class ClusterKey(NamedTuple):
    """The key pair that all machines of an instance share, in Z85: whoever has the secret half belongs to it."""

    public: bytes
    secret: bytes

    @classmethod
    def create(cls) -> ClusterKey:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_secret(cls, secret: bytes) -> ClusterKey:
        """Return the pair whose secret half this is; raise ValueError when it is none."""
        try:
            return cls(zmq.curve_public(secret), secret)
        except (zmq.ZMQError, ValueError) as problem:
            raise ValueError("no CURVE key of 40 Z85 characters") from problem


class ConnectionEvent(Enum):
    """What happened to a connection between machines."""

    MET = auto()  # both sides have the same key; frames pass from now on
    REFUSED = auto()  # something answers there, but it has another key or none
    LOST = auto()  # the connection ended, or the other side gave no sign of life


_WATCHED_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class Receiver(Protocol):
    """What a worker or the engine core needs of its side of a connection."""

    def receive(self, timeout_s: float | None) -> bytes | None: ...
    def send(self, frame: bytes) -> bool: ...


def _configure(socket: Any, address: str, key: ClusterKey | None = None) -> None:
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    if address.startswith("ipc://") and key is None:
        return
    if not address.startswith("tcp://") or key is None:
        raise ValueError(f"{address}: only ipc:// without a cluster key, and tcp:// with one")
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_S * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, (HEARTBEAT_S + HEARTBEAT_TIMEOUT_S) * 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_S * 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_S * 1000)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)


class _OnlyOurKey:
    """Says to pyzmq's authenticator whose proofs count."""

    def __init__(self, key: ClusterKey) -> None:
        self.key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.key.public


class Listener:
    """The bound side of a border: receives from and sends to peers by their names.

    With a key, a name belongs to whoever took it first, until that connection ends.
    """

    def __init__(self, address: str, key: ClusterKey | None = None) -> None:
        """Bind `address`: an `ipc://` path of at most 107 bytes, or with a key `tcp://` and an interface's address.

        Raises OSError when that is not possible.
        """
        self._authenticator: ThreadAuthenticator | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if key else zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        _configure(self.socket, address, key)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise a frame to an unknown peer vanishes silently
        if key is None:
            self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes over its name
        else:
            self._admit_only(key)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as problem:
            self.close()
            raise OSError(problem.errno, problem.strerror, address) from problem

    def _admit_only(self, key: ClusterKey) -> None:
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator nobody is let in, not everybody
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), credentials_provider=_OnlyOurKey(key))

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
        """Close the socket; with a key, what is queued is still sent, within `LAST_WORDS_MS`."""
        if self._authenticator is None:
            self.socket.close()
        else:
            self._authenticator.stop()
            self.socket.close(LAST_WORDS_MS)
            self._context.term()


class Connection:
    """A peer's side of a border, for processes without an event loop."""

    def __init__(self, address: str, name: str, key: ClusterKey | None = None) -> None:
        """Connect to `address` under `name`; the listener may come later, and may come back after a restart."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _configure(self.socket, address, key)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self._monitor: zmq.Socket[bytes] | None = None
        if key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, key.public)
            self._monitor = self.socket.get_monitor_socket(_WATCHED_EVENTS)
        self.socket.connect(address)

    def next_event(self, timeout_s: float | None) -> ConnectionEvent | None:
        """Return what happened next to a connection with a key; None when nothing does within `timeout_s`.

        May be called by another thread than the other methods.
        """
        if self._monitor is None:
            raise ValueError("a connection without a key has no events")
        if not self._monitor.poll(None if timeout_s is None else round(timeout_s * 1000)):
            return None
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return ConnectionEvent.MET
        return ConnectionEvent.LOST if event == zmq.EVENT_DISCONNECTED else ConnectionEvent.REFUSED

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
        if self._monitor is not None:
            self.socket.disable_monitor()
        self.socket.close()


class AsyncConnection:
    """A peer's side of a border on an asyncio event loop."""

    def __init__(self, address: str, name: str) -> None:
        self.socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self.socket, address)
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
