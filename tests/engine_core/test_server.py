"""The engine core over its real sockets, with oracle workers: commands in, outputs out, nothing kills it."""

import random

import msgspec
import pytest
from engine_harness import ApiServer, ServerThread, WorkerThread
from scheduler_harness import expected, make_config

from octavo.engine_core.executor import WorkerExecutor, WorkerLostError
from octavo.engine_core.server import Server, common_memory
from octavo.protocol.codec import encode
from octavo.protocol.config import ParallelConfig
from octavo.protocol.engine_messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    AddRequest,
    EngineReady,
    ErrorCode,
    FinishReason,
    Hello,
)
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.transport import Connection, Listener
from octavo.protocol.worker_messages import ModelRunnerOutput, WorkerReady


@pytest.fixture
def start(tmp_path):
    """A function that starts a server, its workers and one API server; all are stopped at the end."""
    started = []

    def start(num_workers=1, is_paused=False, **options):
        config = make_config(str(tmp_path), **options)
        config = msgspec.structs.replace(config, parallel=ParallelConfig(tensor_parallel_size=num_workers))
        server = ServerThread(config)
        workers = [WorkerThread(config, rank) for rank in range(num_workers)]
        if is_paused:
            workers[0].paused.set()
        api_server = ApiServer(config)
        started.extend([*workers, server])
        for thread in started:
            thread.start()
        api_server.hello()
        api_server.wait_until(lambda: api_server.ready)
        api_servers.append(api_server)
        return config, server, workers, api_server

    api_servers = []
    yield start
    for api_server in api_servers:
        api_server.close()
    for thread in started:
        thread.stop()


def is_quiet(api_server):
    stats = api_server.stats
    return stats and stats.num_running_requests == stats.num_waiting_requests == stats.num_used_blocks == 0


def test_a_request_goes_in_and_its_tokens_come_out(start):
    config, _, _, api_server = start()
    assert api_server.ready == EngineReady(PROTOCOL_VERSION, 4, 64, 256)
    command = api_server.add("a", [1, 2, 3], max_tokens=40)
    assert api_server.wait_for("a") == expected(config, command)
    api_server.wait_until(lambda: is_quiet(api_server))
    assert api_server.stats.num_total_blocks == 64
    assert api_server.stats.num_steps >= len(api_server.outputs["a"])


def test_hello_is_answered_when_every_worker_is_ready_and_no_sooner(tmp_path):
    config = make_config(str(tmp_path))
    config = msgspec.structs.replace(config, parallel=ParallelConfig(tensor_parallel_size=2))
    server, workers = ServerThread(config), [WorkerThread(config, rank, 64 - rank) for rank in range(2)]
    api_server = ApiServer(config)
    api_server.hello()
    command = api_server.add("early", [1, 2, 3])
    server.start()
    workers[1].start()
    assert not api_server.receive(timeout_s=0.3)
    workers[0].start()
    assert api_server.wait_for("early") == expected(config, command)
    assert api_server.ready.num_device_blocks == 63
    api_server.close()
    for thread in (*workers, server):
        thread.stop()


def test_every_rank_runs_every_step_and_rank_0_answers(start):
    config, _, workers, api_server = start(num_workers=2)
    command = api_server.add("a", [1, 2, 3], ignore_eos=True)
    assert api_server.wait_for("a") == expected(config, command)
    for worker in workers:
        worker.stop()
    assert workers[0].num_steps == workers[1].num_steps > 0


def test_api_servers_hear_of_their_own_requests_and_all_of_the_state(start):
    config, _, _, first = start()
    second = ApiServer(config, "api-1")
    second.hello()
    second.wait_until(lambda: second.ready and second.stats)
    commands = [first.add("a", [1, 2]), second.add("b", [3, 4])]
    assert first.wait_for("a") == expected(config, commands[0])
    assert second.wait_for("b") == expected(config, commands[1])
    first.wait_until(lambda: is_quiet(first) and first.stats.num_steps)
    second.wait_until(lambda: is_quiet(second) and second.stats.num_steps)
    assert (list(first.outputs), list(second.outputs)) == (["a"], ["b"])
    second.close()


def test_the_state_is_told_after_an_abort_that_no_step_follows(start):
    _, _, workers, api_server = start(max_num_seqs=1, is_paused=True)
    api_server.add("running", [1, 2, 3])
    api_server.add("waiting", [1, 2, 3])
    api_server.wait_until(lambda: api_server.stats and api_server.stats.num_waiting_requests == 1)
    assert api_server.stats.num_used_blocks > 0
    api_server.abort("waiting", "running", "unknown")
    api_server.wait_until(lambda: is_quiet(api_server))
    workers[0].paused.clear()
    assert not api_server.outputs


def test_a_request_that_never_fits_is_refused_and_others_are_not(start):
    config, _, _, api_server = start(num_device_blocks=4)
    api_server.add("large", [1] * 10, max_tokens=8)
    command = api_server.add("small", [1] * 10, max_tokens=7)
    assert api_server.wait_for("small") == expected(config, command)
    end = api_server.ends["large"]
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, ErrorCode.NEVER_FITS)
    assert "need 5 blocks of 4 tokens, and there are 4" in end.error_message


def test_the_same_request_twice_is_one_request(start):
    config, _, _, api_server = start()
    command = api_server.add("a", [1, 2, 3], ignore_eos=True)
    api_server.add("a", [1, 2, 3], ignore_eos=True)
    assert api_server.wait_for("a") == expected(config, command)


def test_an_api_server_that_is_gone_loses_its_requests_and_nobody_else_does(start):
    config, server, _, survivor = start(max_num_seqs=1)
    gone = ApiServer(config, "api-1")
    gone.hello()
    gone.wait_until(lambda: gone.ready)
    gone.add("lost", [1, 2, 3], max_tokens=200, ignore_eos=True)
    gone.wait_until(lambda: "lost" in gone.outputs)
    command = survivor.add("kept", [4, 5, 6])
    gone.close()
    assert survivor.wait_for("kept") == expected(config, command)
    survivor.wait_until(lambda: is_quiet(survivor))
    assert survivor.stats.num_steps < 200
    server.stop()
    assert list(server.server.peers) == [b"api-0"]
    assert not server.server.engine_core.owners


def mutated(frames, numbers):
    """One of `frames` with a few bytes changed, cut off or put in."""
    frame = bytearray(numbers.choice(frames))
    for _ in range(numbers.randint(1, 3)):
        place = numbers.randrange(len(frame))
        match numbers.randrange(3):
            case 0:
                frame[place] = numbers.randrange(256)
            case 1:
                del frame[max(place, 1) :]
            case 2:
                frame[place:place] = numbers.randbytes(4)
    return bytes(frame)


def test_mutated_frames_are_counted_and_dropped(start):
    config, server, workers, api_server = start()
    numbers = random.Random(11)
    commands = [
        encode(Hello()),
        encode(AddRequest("noise", [1, 2, 3], SamplingParams(max_tokens=2), 1.0)),
        encode(AbortRequests(["noise", "x"])),
    ]
    events = [encode(ModelRunnerOutput(1_000_000, [1])), encode(WorkerReady(0, 64))]
    stranger = Connection(config.worker_address, "worker-7")
    noisy = Connection(config.engine_address, "api-noise")
    workers[0].noise.extend(mutated(events, numbers) for _ in range(1000))
    workers[0].noise.append(encode(ModelRunnerOutput(1_000_000, [1])))
    for _ in range(3000):
        noisy.send(mutated(commands, numbers))
        stranger.send(mutated(events, numbers))
    noisy.send(b"")
    noisy.send(b"\x94\xa5Hello\x01" + b"\x91" * 5000 + b"\xc0\xc0")  # deeper than the decoder goes
    command = api_server.add("after the storm", [7, 8, 9], ignore_eos=True)
    assert api_server.wait_for("after the storm") == expected(config, command)
    stranger.close()
    noisy.close()
    server.stop()
    assert server.server.frame_counters.num_bad_frames > 2000
    assert server.server.executor.frame_counters.num_bad_frames > 3000


def test_a_flood_of_aborts_of_nobody_changes_nothing(start):
    config, _, _, api_server = start()
    command = api_server.add("a", [1, 2, 3], ignore_eos=True, max_tokens=30)
    for number in range(2000):
        api_server.abort(f"unknown {number}")
    assert api_server.wait_for("a") == expected(config, command)


def test_a_lost_worker_ends_the_loop(tmp_path):
    config = make_config(str(tmp_path))
    listener, worker_listener = Listener(config.engine_address), Listener(config.worker_address)
    server = Server(config, listener, WorkerExecutor(worker_listener, num_workers=1), WorkerReady(0, 64))
    server.engine_core.add(b"api-0", AddRequest("a", [1, 2, 3], SamplingParams(max_tokens=2), 0.0))
    with pytest.raises(WorkerLostError, match="worker 0 is gone"):
        server.turn(timeout_s=0)
    listener.close()
    worker_listener.close()


def test_the_smallest_worker_decides_how_many_blocks_there_are(caplog):
    config = make_config(block_size=4, max_model_len=41)
    assert common_memory(config, [WorkerReady(0, 12), WorkerReady(1, 10)]).num_device_blocks == 10
    assert not caplog.records
    assert common_memory(config, [WorkerReady(0, 9)]).num_device_blocks == 9
    assert "36 tokens, fewer than --max-model-len 41" in caplog.text


def test_no_memory_for_blocks_is_a_clear_error():
    with pytest.raises(StartupError, match="--memory-utilization") as caught:
        common_memory(make_config(), [WorkerReady(0, 0)])
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
