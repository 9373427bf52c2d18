"""Frames between real sockets in a directory of ours, and the in-process pair that stands in for them."""

import asyncio
import contextlib
import socket
import time

import pytest
import zmq

from octavo.protocol.transport import (
    AsyncConnection,
    ClusterKey,
    Connection,
    ConnectionEvent,
    Listener,
    in_process_pair,
    wait_readable,
)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/socket"


@pytest.fixture
def listener(address):
    listener = Listener(address)
    yield listener
    listener.close()


def receive(listener):
    wait_readable([listener], timeout_s=5)
    received = listener.receive()
    assert received is not None
    return received


def test_frames_go_both_ways_by_name(listener, address):
    peers = [Connection(address, f"worker-{rank}") for rank in range(2)]
    for peer in peers:
        assert peer.send(b"hello")
    assert {receive(listener)[0] for _ in peers} == {b"worker-0", b"worker-1"}
    assert listener.send(b"worker-1", b"step")
    assert peers[1].receive(timeout_s=5) == b"step"
    assert peers[0].receive(timeout_s=0) is None
    for peer in peers:
        peer.close()


def test_an_unknown_peer_is_refused_not_silently_dropped(listener):
    assert not listener.send(b"nobody", b"step")


def test_nothing_blocks(listener):
    assert listener.receive() is None
    wait_readable([listener], timeout_s=0)


def test_a_peer_may_come_first_and_may_come_back(address):
    peer = Connection(address, "api-0")
    peer.send(b"early")
    first = Listener(address)
    assert receive(first) == (b"api-0", b"early")
    first.close()
    second = Listener(address)
    received = None
    while received is None:  # what is sent into a connection that is just ending is lost; then the peer connects anew
        peer.send(b"again")
        wait_readable([second], timeout_s=0.2)
        received = second.receive()
    assert received == (b"api-0", b"again")
    second.close()
    peer.close()


def test_a_restarted_peer_takes_over_its_name(listener, address):
    old = Connection(address, "api-0")
    old.send(b"old")
    receive(listener)
    new = Connection(address, "api-0")
    new.send(b"new")
    assert receive(listener) == (b"api-0", b"new")
    listener.send(b"api-0", b"for the new one")
    assert new.receive(timeout_s=5) == b"for the new one"
    assert old.receive(timeout_s=0) is None
    old.close()
    new.close()


async def test_the_asyncio_side(listener, address):
    peer = AsyncConnection(address, "api-0")
    await peer.send(b"hello")
    name, frame = await asyncio.to_thread(receive, listener)
    assert (name, frame) == (b"api-0", b"hello")
    listener.send(name, b"ready")
    assert await asyncio.wait_for(peer.receive(), 5) == b"ready"
    peer.close()


def test_in_process_pair():
    left, right = in_process_pair()
    left.send(b"a")
    right.send(b"b")
    assert (left.receive(None), right.receive(None)) == (b"b", b"a")
    assert left.receive(0) is None


TCP = "tcp://127.0.0.1"
KEY = ClusterKey.create()


@pytest.fixture
def secure_listener():
    listener = Listener(f"{TCP}:*", KEY)
    yield listener
    listener.close()


def place_of(listener):
    return listener.socket.getsockopt_string(zmq.LAST_ENDPOINT)


def assert_served(listener, name="worker-0"):
    """A peer with the right key is served."""
    peer = Connection(place_of(listener), name, KEY)
    assert peer.next_event(timeout_s=5) is ConnectionEvent.MET
    peer.send(b"hello")
    assert receive(listener) == (name.encode(), b"hello")
    assert listener.send(name.encode(), b"step")
    assert peer.receive(timeout_s=5) == b"step"
    assert listener.receive() is None
    peer.close()


def test_machines_with_the_same_key_meet(secure_listener):
    assert_served(secure_listener)


@pytest.mark.parametrize(("address", "key"), [(f"{TCP}:1", None), ("inproc://x", None), ("ipc:///tmp/x", KEY)])
@pytest.mark.parametrize("side", [Listener, lambda *arguments: Connection(arguments[0], "a", arguments[1])])
def test_between_machines_there_is_nothing_without_a_key(side, address, key):
    with pytest.raises(ValueError, match="only ipc:// without a cluster key"):
        side(address, key)


def send_as_stranger(listener, key_pair, server_key):
    """Send with zmq itself, as somebody else's program does; return the socket."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"worker-0")
    stranger.setsockopt(zmq.LINGER, 0)
    if key_pair is not None:
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, key_pair.public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, key_pair.secret)
        stranger.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    stranger.connect(place_of(listener))
    with contextlib.suppress(zmq.Again):  # turned away before it could send
        stranger.send(b"let me in", zmq.NOBLOCK)
    return stranger


@pytest.mark.parametrize(
    ("key_pair", "server_key"),
    [(None, None), (ClusterKey.create(), ClusterKey.create().public), (ClusterKey.create(), KEY.public)],
    ids=["no key", "another key", "another key, and the public half of ours"],
)
def test_a_stranger_never_gets_a_frame_through_and_does_not_disturb(secure_listener, key_pair, server_key):
    stranger = send_as_stranger(secure_listener, key_pair, server_key)
    wait_readable([secure_listener], timeout_s=0.5)
    assert secure_listener.receive() is None
    assert not secure_listener.send(b"worker-0", b"step")
    assert_served(secure_listener)
    stranger.close()


def test_without_its_authenticator_a_listener_lets_nobody_in(secure_listener):
    """It must not fall back to taking every key, as zmq would."""
    secure_listener._authenticator.stop()
    stranger = send_as_stranger(secure_listener, ClusterKey.create(), KEY.public)
    wait_readable([secure_listener], timeout_s=0.5)
    assert secure_listener.receive() is None
    stranger.close()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", bytes(100_000)])
def test_bytes_of_another_protocol_do_not_disturb(secure_listener, noise):
    host, port = place_of(secure_listener).removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host.strip("[]"), int(port))) as stranger:
        stranger.sendall(noise)
        assert_served(secure_listener)


@pytest.mark.parametrize("key", [ClusterKey.create(), ClusterKey(KEY.public, ClusterKey.create().secret)])
def test_a_wrong_key_is_an_event_of_its_own(secure_listener, key):
    peer = Connection(place_of(secure_listener), "worker-0", key)
    assert peer.next_event(timeout_s=5) is ConnectionEvent.REFUSED
    peer.close()


def test_a_name_is_not_taken_over_while_its_owner_is_connected(secure_listener):
    place = place_of(secure_listener)
    owner, other = Connection(place, "worker-0", KEY), Connection(place, "worker-0", KEY)
    owner.send(b"first")
    assert receive(secure_listener) == (b"worker-0", b"first")
    other.send(b"second")
    secure_listener.send(b"worker-0", b"step")
    assert owner.receive(timeout_s=5) == b"step"
    assert other.receive(timeout_s=0.2) is None
    owner.close()
    other.close()


def test_the_end_of_a_peer_is_seen_from_both_sides(secure_listener):
    peer = Connection(place_of(secure_listener), "worker-0", KEY)
    peer.send(b"hello")
    receive(secure_listener)
    assert peer.next_event(timeout_s=5) is ConnectionEvent.MET
    secure_listener.send(b"worker-0", b"last words")
    secure_listener.close()
    assert peer.next_event(timeout_s=5) is ConnectionEvent.LOST
    assert peer.receive(timeout_s=5) == b"last words"
    peer.close()


def test_a_peer_that_left_is_refused(secure_listener):
    peer = Connection(place_of(secure_listener), "worker-0", KEY)
    peer.send(b"hello")
    receive(secure_listener)
    peer.close()
    deadline_s = time.monotonic() + 10
    while secure_listener.send(b"worker-0", b"") and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not secure_listener.send(b"worker-0", b"")


def test_a_place_that_is_taken_or_elsewhere_is_an_error(secure_listener):
    with pytest.raises(OSError, match="in use"):
        Listener(place_of(secure_listener), KEY)
    with pytest.raises(OSError, match="assign"):
        Listener("tcp://192.0.2.1:1", KEY)  # an address for documentation


@pytest.mark.parametrize("secret", [b"", b"x", b"x" * 41, b"~" * 40, bytes(40)])
def test_what_is_no_key_is_refused(secret):
    with pytest.raises(ValueError, match="no CURVE key"):
        ClusterKey.of_secret(secret)


def test_the_public_half_follows_from_the_secret():
    assert ClusterKey.of_secret(KEY.secret) == KEY
