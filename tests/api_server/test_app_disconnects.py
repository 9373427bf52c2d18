"""Clients that leave or do not read: nothing goes on for nobody, and nobody else notices."""

import asyncio
import json
import socket
import struct
from pathlib import Path

import pytest
from fake_engine import Script
from http_rig import MODEL, Rig, endless, running, says, silent

from octavo.api_server.http import sse
from octavo.protocol.engine_messages import AddRequest

PATHS = ("/v1/chat/completions", "/v1/completions")


async def send_request(
    rig: Rig, path: str, is_streamed: bool, n: int = 1, receive_bytes: int = 0, max_tokens: int = 100_000
) -> socket.socket:
    """Send a long request from a socket of our own and return the socket."""
    subject = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    fields = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "stream": is_streamed, "n": n}
    body = json.dumps({**subject, **fields}).encode()
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", rig.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(client, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


async def check_quiet(rig: Rig, num_aborted: int) -> None:
    """Everything was aborted, and every gauge is back to zero."""
    await rig.until(lambda: len(rig.engine.aborted) == num_aborted)
    assert sorted(rig.engine.aborted) == sorted(request.request_id for request in rig.engine.added)
    await rig.until(lambda: rig.server.metrics.stats.num_running_requests == 0)
    await rig.until(lambda: rig.server.admission.num_live_requests == 0)
    for gauge in ("octavo_running_requests", "octavo_waiting_requests", "octavo_kv_usage_ratio"):
        assert await rig.metric(gauge) == 0
    assert await rig.metric('octavo_finished_requests_total{reason="abort"}') == num_aborted
    num_tokens = await rig.metric("octavo_generation_tokens_total")
    await asyncio.sleep(0.05)
    assert await rig.metric("octavo_generation_tokens_total") == num_tokens


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("is_reset", [True, False])
async def test_b42_closing_the_connection_aborts(
    tmp_path: Path, path: str, is_streamed: bool, is_queued: bool, is_reset: bool
) -> None:
    config_max = 1_000_000
    async with running(tmp_path, silent if is_queued else endless, max_model_len=config_max) as rig:
        client = await send_request(rig, path, is_streamed, n=2)
        if is_queued:
            await rig.until(lambda: len(rig.engine.added) == 2)
        else:
            await rig.until(lambda: rig.server.metrics.num_generation_tokens > 10)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await check_quiet(rig, 2)


async def test_fifty_streams_cut_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, endless, max_model_len=1_000_000) as rig:
        clients = [await send_request(rig, PATHS[0], is_streamed=True) for _ in range(50)]
        await rig.until(lambda: rig.server.metrics.stats.num_running_requests == 50)
        assert await rig.metric("octavo_running_requests") == 50
        for client in clients:
            client.close()
        await check_quiet(rig, 50)


async def test_a_client_that_leaves_while_its_body_is_on_the_way_costs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, endless) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: 100\r\n\r\n{")
        await rig.until(lambda: rig.server.admission.num_live_requests == 1)
        writer.close()
        await rig.until(lambda: rig.server.admission.num_live_requests == 0)
        assert rig.engine.added == []


async def test_a_slow_reader_gets_everything_merged_and_holds_up_nobody(tmp_path: Path) -> None:
    num_tokens = 50_000

    def script(request: AddRequest) -> Script:
        if request.sampling_params.max_tokens == 5:
            return Script([40] * 5)
        return Script([40 + i % 50 for i in range(num_tokens)], tokens_per_output=50)

    async with running(tmp_path, script, max_model_len=1_000_000, send_buffer_bytes=16384) as rig:
        client = await send_request(rig, PATHS[1], is_streamed=True, receive_bytes=4096)
        await rig.until(lambda: rig.engine.running == {} and len(rig.engine.added) == 1)
        for _ in range(5):
            status, _ = await rig.complete(max_tokens=5)
            assert status == 200
        client.setblocking(True)
        received = await asyncio.to_thread(read_until_done, client)
        text = "".join(
            json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            for line in dechunk(received).split(b"\n\n")
            if line.startswith(b"data: {")
        )
        client.close()
    assert len(text) == num_tokens
    assert received.count(b"data: ") < 950  # there were 1,000 outputs


def read_until_done(client: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = client.recv(1 << 20)
        assert part, "the stream was cut"
        data += part
    return data


def dechunk(answer: bytes) -> bytes:
    rest = answer.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


async def test_a_client_that_never_reads_is_cut_and_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.2)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.2)

    def script(request: AddRequest) -> Script:
        return Script([40] * 1_000_000, tokens_per_output=500)

    async with running(tmp_path, script, max_model_len=10_000_000, send_buffer_bytes=16384) as rig:
        rig.engine.step_s = 0.001
        client = await send_request(rig, PATHS[0], is_streamed=True, n=2, receive_bytes=4096, max_tokens=1_000_000)
        await rig.until(lambda: len(rig.engine.aborted) > 0)
        await rig.until(lambda: rig.server.admission.num_live_requests == 0)
        client.close()


@pytest.mark.parametrize("path", PATHS)
async def test_silence_is_broken_by_comments(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    subject = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    async with running(tmp_path, says("ab", interval_s=0.3)) as rig:
        body = {"model": MODEL, "stream": True, "max_tokens": 2, **subject}
        async with rig.session.post(path, json=body) as response:
            text = await response.text()
    first_data = text.index("data:")
    assert text.startswith(": ")
    assert ": " in text[text.index("\n\n", first_data) :].replace('": ', "")
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"role":"assistant"') == ("chat" in path), "a comment is not the opening"


async def test_a_long_prompt_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """While a prompt of 1 MiB is decoded and tokenized, the loop keeps turning."""
    async with running(tmp_path, says("x"), max_model_len=2_000_000) as rig:
        is_over = asyncio.Event()
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while not is_over.is_set():
                await asyncio.sleep(0.001)
                turns += 1

        turning = asyncio.create_task(turn())
        await asyncio.sleep(0.01)
        before = turns
        status, answer = await rig.complete("word " * 200_000, max_tokens=1)
        is_over.set()
        await turning
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 1_000_000
    assert turns - before > 20
