"""The largest step is within the limits, reaches them, and its memory and speed are seen."""

from __future__ import annotations

import msgspec
import pytest
import tiny_llama
import torch

from octavo.protocol.config import SchedulerConfig
from octavo.worker import largest_step
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.largest_step import largest_inputs, measure_largest_step
from octavo.worker.models.config import read_config
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_tokens", "max_num_seqs"),
    [(num_tokens, num) for num_tokens in (1, 64, 100, 512) for num in (1, 3, 64, 256) if num <= num_tokens],
)
@pytest.mark.parametrize("max_model_len", [1, 16, 100, 2048])
@pytest.mark.parametrize("max_tokens_per_request", [None, 1, 24])
def test_every_limit_is_reached_and_none_passed(
    tmp_path, num_tokens, max_model_len, max_num_seqs, max_tokens_per_request
):
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=num_tokens,
        max_tokens_per_request=max_tokens_per_request,
    )
    config = tiny_llama.engine_config(tmp_path, max_model_len=max_model_len)
    positions, metadata = largest_inputs(msgspec.structs.replace(config, scheduler=scheduler))
    chunks = metadata.query_start_loc.diff().tolist()
    longest_chunk = min(num_tokens, max_model_len, max_tokens_per_request or num_tokens)
    assert sum(chunks) == min(num_tokens, max_num_seqs * longest_chunk)
    assert max(chunks) == longest_chunk
    assert min(chunks) > 0
    assert len(chunks) == len(metadata.seq_lens) == len(metadata.block_tables) <= max_num_seqs
    assert metadata.seq_lens.unique().tolist() == [max_model_len]
    assert len(positions) == len(metadata.slot_mapping) == sum(chunks)
    assert 0 <= positions.min() <= positions.max() < max_model_len


@pytest.fixture
def measured(tmp_path):
    directory = tiny_llama.save(tiny_llama.build(vocab_size=50_000), tmp_path)
    config = tiny_llama.engine_config(directory, vocab_size=50_000)
    config = msgspec.structs.replace(config, scheduler=SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=128))
    model = load_model(config.model, read_config(config.model.path), torch.float32, CPU)
    return model, Sampler(50_000, ()), config, torch.float32, CPU_DEVICE


def test_its_memory_is_seen(measured):
    logits_bytes = 4 * 100 * 50_000
    assert logits_bytes < measure_largest_step(*measured).num_bytes < 40 * logits_bytes


class Clock:
    """Each look at it is later by the next of `durations_s`, so that a run takes what it says."""

    def __init__(self, *durations_s: float) -> None:
        self.times_s = [0.0]
        for duration_s in durations_s:
            self.times_s += [self.times_s[-1] + duration_s, self.times_s[-1] + duration_s]

    def perf_counter(self) -> float:
        return self.times_s.pop(0)


@pytest.mark.parametrize(
    ("durations_s", "tokens_per_s", "seq_lens"),
    [
        ((0.5, 0.125), 128 / (3 * 0.125), [200, 128]),  # the second run, in half the context or its own chunk
        ((0.75,), 128 / (3 * 0.75), [200]),  # a second one would take too long
    ],
)
def test_the_speed_is_that_of_all_layers(measured, monkeypatch, durations_s, tokens_per_s, seq_lens):
    model = measured[0]
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[3].seq_lens.unique().tolist()))
    monkeypatch.setattr(largest_step, "time", Clock(*durations_s))
    assert measure_largest_step(*measured).tokens_per_s == tokens_per_s
    assert seen == [[seq_len] for seq_len in seq_lens]
