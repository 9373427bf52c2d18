"""From the start to the end of a server: readiness, overload, deadlines, a failing engine, drains."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_rig import MODEL, Rig, endless, make_config, parse_events, running, says, silent

from octavo.protocol import codec
from octavo.protocol.engine_messages import EngineReady, ErrorCode, FinishReason

PATHS = ("/v1/chat/completions", "/v1/completions")
SUBJECT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


async def get(rig: Rig, path: str) -> tuple[int, dict[str, Any], Any]:
    async with rig.session.get(path) as response:
        return response.status, dict(response.headers), await response.json()


async def raw_post(rig: Rig, path: str, **fields: Any) -> tuple[int, dict[str, str], str]:
    async with rig.session.post(path, json={"model": MODEL, **SUBJECT[path], **fields}) as response:
        return response.status, dict(response.headers), await response.text()


def code_of(text: str) -> str:
    return msgspec.json.decode(text)["error"]["code"]


async def test_before_the_engine_is_ready_only_the_probes_answer(tmp_path: Path) -> None:
    async with running(tmp_path, says("x"), is_ready=False) as rig:
        assert (await get(rig, "/health"))[0] == 200
        status, _, body = await get(rig, "/ready")
        assert (status, body["phase"]) == (503, "starting")
        assert body["elapsed_s"] >= 0
        for path in PATHS:
            status, headers, text = await raw_post(rig, path)
            assert (status, code_of(text)) == (503, "starting")
            assert int(headers["Retry-After"]) >= 1
        status, headers, body = await get(rig, "/v1/models")
        assert (status, body["error"]["code"]) == (503, "starting")
        rig.engine.become_ready()
        await rig.until(lambda: rig.server.state.phase == "ready")
        status, _, body = await get(rig, "/ready")
        assert (status, body["phase"]) == (200, "ready")
        assert (await rig.complete())[0] == 200


async def test_version(tmp_path: Path) -> None:
    async with running(tmp_path, says("x")) as rig:
        status, _, body = await get(rig, "/version")
    assert status == 200
    assert body["version"].count(".") >= 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_full_server_refuses_before_any_event(tmp_path: Path, path: str, is_streamed: bool) -> None:
    async with running(tmp_path, silent, max_queued_requests=2) as rig:  # and 4 that may run
        waiting = [asyncio.create_task(raw_post(rig, path, stream=is_streamed, n=2)) for _ in range(3)]
        await rig.until(lambda: rig.server.admission.num_live_requests == 6)
        status, headers, text = await raw_post(rig, path, stream=is_streamed)
        assert (status, code_of(text)) == (429, "overloaded")
        assert int(headers["Retry-After"]) >= 1
        waiting.pop().cancel()
        await rig.until(lambda: rig.server.admission.num_live_requests == 4)
        status, _, text = await raw_post(rig, path, stream=is_streamed, n=3)
        assert (status, code_of(text)) == (429, "overloaded")
        assert len(rig.engine.added) == 6
        for task in waiting:
            task.cancel()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("is_queued", [True, False])
async def test_a_request_ends_at_its_deadline(tmp_path: Path, path: str, is_streamed: bool, is_queued: bool) -> None:
    script = silent if is_queued else says("x" * 400, interval_s=0.005)
    async with running(tmp_path, script, request_timeout_s=0.2) as rig:
        status, _, text = await raw_post(rig, path, stream=is_streamed, max_tokens=400)
        if is_streamed and not is_queued:
            assert status == 200
            assert parse_events(text)[-1]["error"]["code"] == "request_timeout"
        else:
            assert (status, code_of(text)) == (504, "request_timeout")
        await rig.until(lambda: rig.engine.aborted == [rig.engine.added[0].request_id])
        assert await rig.metric('octavo_finished_requests_total{reason="error"}') == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_gap_in_the_output_fails_the_request(tmp_path: Path, path: str, is_streamed: bool) -> None:
    async with running(tmp_path, says("abcdef", gap_at=3, interval_s=0.02)) as rig:
        status, _, text = await raw_post(rig, path, stream=is_streamed, max_tokens=6)
        if is_streamed:
            *chunks, last = parse_events(text)
            assert len(chunks) >= 3
            assert last["error"]["code"] == "internal_error"
        else:
            assert (status, code_of(text)) == (500, "internal_error")


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_one_failed_choice_fails_its_request_alone(tmp_path: Path, is_streamed: bool) -> None:
    failing = says("abc", finish_reason=FinishReason.ERROR, error=ErrorCode.NUMERICAL_ERROR, interval_s=0.02)
    good = says("abc")
    async with running(tmp_path, lambda r: failing(r) if r.sampling_params.max_tokens == 100 else good(r)) as rig:
        bad, other = await asyncio.gather(
            raw_post(rig, PATHS[0], stream=is_streamed, max_tokens=100, n=2),
            rig.complete(max_tokens=3),
        )
        assert other[0] == 200
        if is_streamed:
            assert parse_events(bad[2])[-1]["error"]["code"] == "numerical_error"
        else:
            assert (bad[0], code_of(bad[2])) == (500, "numerical_error")


async def test_frames_that_are_no_messages_are_counted_and_dropped(tmp_path: Path) -> None:
    async with running(tmp_path, says("abc", interval_s=0.02)) as rig:
        answer = asyncio.create_task(rig.complete(max_tokens=3))
        await rig.until(lambda: len(rig.engine.added) == 1)
        for frame in (b"", b"garbage", codec.encode({"a": 1}), b"\x92\xa0"):
            rig.engine.send_raw(frame)
        assert (await answer)[0] == 200
        await rig.until(lambda: rig.server.metrics.num_bad_frames == 4)


async def test_a_background_task_that_ends_ends_the_server(tmp_path: Path) -> None:
    async def lose_the_engine() -> tuple[int, Any]:
        async with running(tmp_path, endless) as rig:
            answer = asyncio.create_task(rig.complete(max_tokens=400))
            await rig.until(lambda: len(rig.engine.added) == 1)
            rig.engine.send_raw(codec.encode(EngineReady(99, 16, 1, 1)))
            assert rig.life is not None
            await asyncio.wait([rig.life], timeout=10)
            status, body = await answer
            assert (status, body["error"]["code"]) == (500, "internal_error")

    with pytest.raises(RuntimeError, match="protocol"):
        await lose_the_engine()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_defect_of_ours_is_a_500_without_its_text(
    tmp_path: Path, path: str, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("/secret/path")

    monkeypatch.setattr("octavo.api_server.generation.choices.OutputProcessor.process", fail)
    async with running(tmp_path, endless) as rig:
        status, _, text = await raw_post(rig, path, stream=is_streamed)
        assert (status, code_of(text)) == (500, "internal_error")
        assert "secret" not in text
        await rig.until(lambda: len(rig.engine.aborted) == 1)


async def test_drain_takes_requests_in_the_grace_finishes_and_ends(tmp_path: Path) -> None:
    config = make_config(tmp_path, drain_grace_s=0.4)
    async with running(tmp_path, says("x" * 100, interval_s=0.01), config=config) as rig:
        first = asyncio.create_task(rig.stream(PATHS[0], max_tokens=100))
        await rig.until(lambda: len(rig.engine.added) == 1)
        rig.server.drain()
        await rig.until(lambda: rig.server.state.phase == "draining")
        status, headers, body = await get(rig, "/ready")
        assert (status, body["phase"]) == (503, "draining")
        assert headers["Connection"] == "close"
        assert (await get(rig, "/health"))[0] == 200
        status, answer = await rig.complete(max_tokens=10)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 10)
        await rig.until(lambda: rig.server.state.phase == "refusing")
        for path in PATHS:
            status, headers, text = await raw_post(rig, path)
            assert (status, code_of(text)) == (503, "shutting_down")
            assert headers["Connection"] == "close"
            assert int(headers["Retry-After"]) >= 1
        events = await first
        assert events[-1] == "[DONE]"
        assert rig.life is not None
        await asyncio.wait([rig.life], timeout=10)
        assert rig.life.done()
        assert rig.life.exception() is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_hurried", [True, False])
async def test_what_does_not_finish_in_a_drain_gets_an_error(tmp_path: Path, path: str, is_hurried: bool) -> None:
    times = {"drain_grace_s": 60.0} if is_hurried else {"drain_grace_s": 0.0, "drain_timeout_s": 0.2}
    async with running(tmp_path, endless, max_model_len=1_000_000, **times) as rig:
        stream = asyncio.create_task(raw_post(rig, path, stream=True, max_tokens=100_000))
        whole = asyncio.create_task(raw_post(rig, path, max_tokens=100_000))
        await rig.until(lambda: rig.server.metrics.num_generation_tokens > 20)
        rig.server.drain()
        if is_hurried:
            rig.server.drain()
        status, _, text = await whole
        assert (status, code_of(text)) == (503, "shutting_down")
        status, _, text = await stream
        assert status == 200
        events = parse_events(text)
        assert events[-1]["error"]["code"] == "shutting_down"
        assert rig.life is not None
        await asyncio.wait([rig.life], timeout=10)
        assert rig.life.exception() is None


async def test_connections_above_the_limit_get_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.api_server.server.MAX_CONNECTIONS", 2)
    async with running(tmp_path, says("x")) as rig:
        held = [await asyncio.open_connection("127.0.0.1", rig.port) for _ in range(2)]
        status, headers, _ = await health_of(rig)
        assert status == 503
        assert headers["Connection"] == "close"
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(10):
            while (await health_of(rig))[0] != 200:
                pass  # each refusal is a round trip


async def health_of(rig: Rig) -> tuple[int, dict[str, str], bytes]:
    async with rig.session.get("/health") as response:
        return response.status, dict(response.headers), await response.read()


async def test_the_log_has_requests_only_when_asked_and_never_their_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for is_asked in (False, True):
        async with running(tmp_path, says("answer"), log_requests=is_asked) as rig:
            await rig.post("/v1/completions?q=secret", {"model": MODEL, "prompt": "secret"})
        assert ("POST /v1/completions 200" in caplog.text) is is_asked
    assert "secret" not in caplog.text
