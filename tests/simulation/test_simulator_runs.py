"""Whole simulations: the same twice, every request to its end, and figures that can be worked out by hand."""

import builtins
import json
import random

import pytest

from octavo.protocol.config import AdmissionPolicy, PreemptionMode
from octavo.simulator.__main__ import main, settings_of, variants
from octavo.simulator.cost_model import StepLoad
from octavo.simulator.report import as_json, from_json
from octavo.simulator.run import run
from octavo.simulator.settings import Settings, Setup
from octavo.simulator.simulation import Simulation, StuckError

SMALL = {"device": "cpu", "model": "smollm2-135m"}


@pytest.fixture
def trace(tmp_path):
    """Requests with random lengths, half of which open with the same two blocks of 512 tokens."""
    numbers = random.Random(11)
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for index in range(60):
            row = {
                "timestamp": 20 * index,
                "input_length": 1100 + numbers.randrange(200),
                "output_length": numbers.randint(1, 400),
                "hash_ids": [1, 2, 1000 + index] if index % 2 else [2000 + index, 3000 + index, 4000 + index],
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


PRESSURE = {
    "roomy": {},
    "plain loop": {"max_steps_in_flight": 1},
    "tight": {"num_device_blocks": 300},
    "tight with a host tier": {
        "num_device_blocks": 300,
        "num_host_blocks": 300,
        "preemption_mode": PreemptionMode.SWAP,
    },
    "no cache": {"num_device_blocks": 300, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("pressure", PRESSURE)
def test_every_request_ends_with_its_true_length_and_twice_the_same(trace, pressure):
    settings = Settings(trace=trace, **SMALL, **PRESSURE[pressure])
    (report, _), (again, _) = run(settings), run(settings)
    shapes = Setup(settings).shapes()
    assert report == again
    assert report.num_requests == len(shapes) == 60
    assert report.num_output_tokens == sum(shape.num_output_tokens for shape in shapes)
    assert (report.num_preemptions > 0) == ("num_device_blocks" in PRESSURE[pressure])


def test_slots_are_counted_as_the_scheduler_counts_them(trace):
    """At every step: tokens and the rest make up the allocated slots, and no use is negative."""
    _, measured = run(Settings(trace=trace, num_device_blocks=300, **SMALL))
    steps = measured.columns()
    assert (steps["num_token_slots"] > 0).all()
    assert (steps["num_reserved_slots"] >= 0).all()
    assert (steps["num_internal_slots"] >= 0).all()
    assert (steps["num_internal_slots"] <= 15 * steps["num_running"]).all(), "more than the rest of the last blocks"
    used = steps["num_token_slots"] + steps["num_reserved_slots"] + steps["num_internal_slots"]
    assert (used == steps["num_allocated_slots"]).all()


def test_equal_openings_are_found_in_the_cache(trace):
    with_cache, _ = run(Settings(trace=trace, **SMALL))
    without_cache, _ = run(Settings(trace=trace, enable_prefix_caching=False, **SMALL))
    shapes = Setup(Settings(trace=trace)).shapes()
    most = 29 * 1024 / sum(shape.num_prompt_tokens for shape in shapes)
    assert most * 0.9 <= with_cache.prefix_hit_rate <= most
    assert without_cache.prefix_hit_rate == 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_one_request_by_hand(max_steps_in_flight):
    """Prompt of 5, output of 4, blocks of 4: the steps leave 5, 6, 7 and 8 tokens in 8 slots."""
    settings = Settings(
        trace="fixed:5x4", num_requests=1, block_size=4, max_steps_in_flight=max_steps_in_flight, **SMALL
    )
    report, measured = run(settings)
    assert measured.columns()["num_token_slots"].tolist()[:4] == [5, 6, 7, 8]
    assert measured.columns()["num_internal_slots"].tolist()[:4] == [3, 2, 1, 0]
    cost_model = Setup(settings).cost_model
    loads = [StepLoad(5, 1, 5, 15), StepLoad(1, 1, 6, 6), StepLoad(1, 1, 7, 7), StepLoad(1, 1, 8, 8)]
    durations_s = [cost_model.step_s(load) for load in loads]
    num_waits = 4 if max_steps_in_flight == 1 else 1  # a step that was sent ahead does not wait for the host
    assert report.makespan_s == pytest.approx(sum(durations_s) + num_waits * cost_model.host_s)
    assert report.ttft.p50 == pytest.approx(durations_s[0] + cost_model.host_s)
    assert report.tpot.p50 == pytest.approx((report.makespan_s - report.ttft.p50) / 3)
    assert len(measured.itl_s) == 3
    if max_steps_in_flight == 1:
        waste_s = sum(slots * duration_s for slots, duration_s in zip((3, 2, 1, 0), durations_s, strict=True))
        assert report.num_steps == 4
        assert report.kv_waste == pytest.approx(waste_s / (8 * sum(durations_s)))
        assert report.kv_waste_mean_of_steps == pytest.approx(6 / 32)
    else:
        assert report.num_steps == 5, "one step is computed ahead of the end, for nothing"


def test_a_full_queue_holds_arrivals_back(monkeypatch):
    monkeypatch.setattr("octavo.simulator.simulation.MAX_WAITING_REQUESTS", 3)
    setup = Setup(Settings(trace="fixed:5x4", num_requests=20, max_num_seqs=2, **SMALL))
    simulation = Simulation(setup, setup.shapes())
    simulation.run()
    waiting = simulation.measurements.columns()["num_waiting"]
    assert simulation.measurements.num_finished == 20
    assert waiting[0] > 10, "who is held back waits too"
    assert waiting[-1] == 0


def test_a_request_that_ends_too_early_is_noticed(monkeypatch):
    monkeypatch.setattr("octavo.simulator.worker.SimulatedWorker._sample", lambda *_: 0)
    with pytest.raises(StuckError, match="r0 ended after 1 tokens"):
        run(Settings(trace="fixed:5x4", num_requests=1, **SMALL))


# The command


def test_reports_survive_json():
    report, _ = run(Settings(trace="fixed:5x4", num_requests=2, admission_policy=AdmissionPolicy.RESERVE_ALL, **SMALL))
    assert from_json(as_json([report, report])) == [report, report]


def test_the_command_compares_and_writes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    line = "--trace fixed:50x9 --num-requests 12 --device cpu --model-preset smollm2-135m --num-device-blocks 64"
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main([*line.split(), *files, "--compare", "reservation=max,paged", "--max-model-len", "256"]) == 0
    assert [report.settings.reservation for report in from_json((tmp_path / "a.json").read_bytes())] == ["max", "paged"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["reservation", "max", "paged"]
    assert table[1].split() == ["requests", "12", "12"]


def test_any_option_can_be_compared():
    assert variants(["--trace", "x"], "block-size=1,16") == (
        "block-size",
        {"1": ["--trace", "x", "--block-size", "1"], "16": ["--trace", "x", "--block-size", "16"]},
    )
    assert settings_of(["--trace", "x", "--block-size", "1", "--block-size", "16"]).block_size == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rate-scale 0", "rate_scale"),
        ("--block-size 0", "block_size"),
        ("--compare block-size", "--compare must be"),
        ("--compare nonsense=1,2", "--compare knows no option --nonsense"),
        ("--length-scale inf", "length_scale"),
        ("--length-scale 1e300", "length_scale"),
        ("--num-device-blocks 99999999999", "num_device_blocks"),
        ("--json /nowhere/report.json", "/nowhere/report.json"),
        ("--plot /", "directory"),
        ("--trace fixed:0x5", "fixed:PROMPTxOUTPUT"),
        ("--model-preset llama-70b", "--num-devices"),
        ("--max-model-len 1", "max_model_len"),
        ("--max-num-seqs 64 --max-num-batched-tokens 8", "max_num_seqs"),
        ("--trace /nowhere/trace.csv", "/nowhere/trace.csv"),
    ],
)
def test_bad_options_are_named(capsys, options, message):
    with pytest.raises(SystemExit) as ending:
        main(["--trace", "fixed:5x4", "--num-requests", "1", *options.split()])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    real_import = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(SystemExit):
        main(["--trace", "fixed:5x4", "--plot", "x.png"])
    assert "pip install 'octavo[simulate]'" in capsys.readouterr().err
