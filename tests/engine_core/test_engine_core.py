"""EngineCore with an executor that only records: how many steps go out, and who gets which output."""

import pytest
from scheduler_harness import make_config

from octavo.engine_core.engine_core import EngineCore
from octavo.engine_core.executor import WorkerExecutor
from octavo.protocol.codec import encode
from octavo.protocol.engine_messages import AbortRequests, AddRequest, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.transport import Connection, Listener, wait_readable
from octavo.protocol.worker_messages import ModelRunnerOutput, WorkerReady


class RecordingExecutor:
    def __init__(self):
        self.steps = []
        self.num_sampled = {}
        self.num_steady = 0

    def execute(self, step):
        """Note the step, and how many tokens it samples: the prompts of these tests are computed in one."""
        self.num_steady += len(step.steady_joined) - len(step.steady_left)
        self.num_sampled[step.step_id] = self.num_steady + len(step.num_scheduled_tokens)
        self.steps.append(step)

    def result(self, step, token_id=9):
        return ModelRunnerOutput(step.step_id, [token_id] * self.num_sampled[step.step_id])


def make_core(**options):
    executor = RecordingExecutor()
    return EngineCore(make_config(eos_token_ids=(2,), **options), executor, WorkerReady(0, 64)), executor


def command(request_id, **params):
    return AddRequest(request_id, [1, 2, 3], SamplingParams(**{"max_tokens": 10, **params}), 0.0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_as_many_steps_go_out_as_may_be_in_flight(max_steps_in_flight):
    core, executor = make_core(max_steps_in_flight=max_steps_in_flight)
    core.add(b"api-0", command("a"))
    core.step()
    core.step()
    assert len(executor.steps) == max_steps_in_flight
    core.update(executor.result(executor.steps[0]))
    core.step()
    assert len(executor.steps) == max_steps_in_flight + 1


def test_outputs_go_to_the_owner_once():
    core, executor = make_core()
    core.add(b"api-0", command("a", max_tokens=1))
    core.add(b"api-1", command("b"))
    core.add(b"api-0", command("c"))
    core.step()
    core.update(executor.result(executor.steps[0]))
    outputs = core.take_outputs()
    assert {name: [output.request_id for output in list_] for name, list_ in outputs.items()} == {
        b"api-0": ["a", "c"],
        b"api-1": ["b"],
    }
    assert outputs[b"api-0"][0].finish_reason is FinishReason.LENGTH
    assert core.take_outputs() == {}
    assert core.owners == {"b": b"api-1", "c": b"api-0"}


def test_a_live_id_keeps_its_owner():
    core, executor = make_core()
    core.add(b"api-0", command("a"))
    core.add(b"api-1", command("a"))
    core.step()
    core.update(executor.result(executor.steps[0]))
    assert list(core.take_outputs()) == [b"api-0"]


def test_an_aborted_request_answers_nothing_and_its_id_may_come_back():
    core, executor = make_core()
    core.add(b"api-0", command("a"))
    core.step()
    core.abort(AbortRequests(["a", "a", "unknown"]))
    core.update(executor.result(executor.steps[0]))
    core.update(executor.result(executor.steps[1]))
    assert core.take_outputs() == {}
    core.check_idle()
    core.add(b"api-1", command("a"))
    assert core.owners == {"a": b"api-1"}


def test_a_lost_owner_takes_only_its_own_with_it():
    core, executor = make_core()
    core.add(b"api-0", command("a"))
    core.add(b"api-1", command("b"))
    core.step()
    core.update(executor.result(executor.steps[0]))
    core.abort_all_of(b"api-0")
    assert list(core.take_outputs()) == [b"api-1"]
    assert list(core.scheduler.requests) == ["b"]


def test_only_rank_0_reports_results(tmp_path):
    listener = Listener(f"ipc://{tmp_path}/worker")
    executor = WorkerExecutor(listener, num_workers=2)
    workers = [Connection(f"ipc://{tmp_path}/worker", f"worker-{rank}") for rank in range(2)]
    workers[1].send(encode(ModelRunnerOutput(1, [])))
    wait_readable([listener], timeout_s=10)
    assert executor.receive_result() is None
    workers[0].send(encode(ModelRunnerOutput(0, [])))
    wait_readable([listener], timeout_s=10)
    assert executor.receive_result() == ModelRunnerOutput(0, [])
    for socket in (*workers, listener):
        socket.close()
