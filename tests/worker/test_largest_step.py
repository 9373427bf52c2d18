"""The largest step is within the limits, reaches them, and its memory is seen."""

from __future__ import annotations

import msgspec
import pytest
import tiny_llama
import torch

from octavo.protocol.config import SchedulerConfig
from octavo.worker.largest_step import largest_inputs, measure_largest_step_bytes
from octavo.worker.models.config import read_config
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_tokens", [1, 64, 100, 512])
@pytest.mark.parametrize("max_model_len", [1, 16, 100, 2048])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 256])
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


def test_its_memory_is_seen(tmp_path):
    directory = tiny_llama.save(tiny_llama.build(vocab_size=50_000), tmp_path)
    config = tiny_llama.engine_config(directory, vocab_size=50_000)
    config = msgspec.structs.replace(config, scheduler=SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=128))
    model = load_model(config.model, read_config(config.model.path), torch.float32, CPU)
    sampler = Sampler(50_000, (), CPU)
    logits_bytes = 4 * 100 * 50_000
    assert logits_bytes < measure_largest_step_bytes(model, sampler, config, torch.float32, CPU) < 40 * logits_bytes
