"""Arrays reach the device whole, in one copy, and are where graphs look for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_device import FakeGpu

from octavo.worker.request_states import RequestStates
from octavo.worker.step_inputs import resolve_token_ids, step_num_bytes
from octavo.worker.step_upload import DirectUploader, PackedUploader


def arrays_of(value: int, num_tokens: int = 5) -> dict[str, np.ndarray]:
    return {
        "ids": np.full(num_tokens, value, np.int64),
        "lens": np.arange(num_tokens, dtype=np.int32) + value,
        "odd": np.full((3, 1), value, np.int32),
        "reals": np.full(num_tokens, value / 4, np.float32),
        "table": np.arange(2 * num_tokens, dtype=np.int32).reshape(2, num_tokens)[:, ::2] + value,
        "doubles": np.full(2, value / 8, np.float64),
        "nothing": np.zeros((0, 4), np.int32),
    }


@pytest.fixture
def gpu():
    with FakeGpu(3) as gpu:
        yield gpu


def test_what_arrives_is_what_was_sent_also_when_the_next_ones_are_under_way(gpu):
    uploader = PackedUploader(gpu, 4096)
    arrived = []
    for value in range(20):
        tensors = uploader.upload(arrays_of(value, 3 + value % 4))
        arrived.append({name: gpu.download(tensor) for name, tensor in tensors.items()})
    gpu.synchronize()
    for value, tensors in enumerate(arrived):
        for name, array in arrays_of(value, 3 + value % 4).items():
            assert tensors[name].dtype == torch.from_numpy(array).dtype
            np.testing.assert_array_equal(tensors[name].numpy(), array)


def test_a_step_is_one_copy_and_waits_for_nothing_with_two_in_flight(gpu):
    uploader = PackedUploader(gpu, 4096)
    gpu.synchronize()
    gpu.moves_by_itself = False
    with gpu.no_waiting():
        uploader.upload(arrays_of(1))
        first = gpu.record()
        uploader.upload(arrays_of(2))
    assert gpu.num_copies_to_device == 2
    first.synchronize()
    with gpu.no_waiting():
        uploader.upload(arrays_of(3))
    with pytest.raises(AssertionError, match="waits"), gpu.no_waiting():
        uploader.upload(arrays_of(4))  # three are on their way, and there are two buffers


def test_arrays_of_the_same_shapes_are_the_same_tensors(gpu):
    uploader = PackedUploader(gpu, 4096)
    first, second = uploader.upload(arrays_of(1)), uploader.upload(arrays_of(2))
    assert all(first[name] is second[name] for name in first)
    longer = uploader.upload(arrays_of(1, 6))
    assert longer["lens"] is not first["lens"]


def test_kernels_find_their_arrays_aligned(gpu):
    tensors = PackedUploader(gpu, 4096).upload(arrays_of(1))
    assert all(tensor.content.storage_offset() * tensor.itemsize % 64 == 0 for tensor in tensors.values())


def test_what_does_not_fit_goes_alone(gpu):
    uploader = PackedUploader(gpu, 256)
    gpu.synchronize()
    arrays = {"a": np.arange(20), "large": np.arange(100), "b": np.arange(5, dtype=np.int32)}
    with gpu.no_waiting():
        tensors = uploader.upload(arrays)
    assert gpu.num_copies_to_device == 2
    for name, array in arrays.items():
        assert tensors[name].cpu().tolist() == array.tolist()


def test_on_a_cpu_nothing_moves():
    arrays = arrays_of(1)
    tensors = DirectUploader().upload(arrays)
    arrays["ids"][2] = 77
    assert tensors["ids"].tolist() == [1, 1, 77, 1, 1]


def test_tokens_that_only_the_device_knows():
    last = torch.tensor([10, 11, 12])
    token_ids = torch.tensor([5, -1, -3, 0, -2])
    assert resolve_token_ids(token_ids, last).tolist() == [5, 10, 12, 0, 11]


def test_the_largest_step_fits():
    """With tables of the longest requests and every option of sampling."""
    states = RequestStates(6, 100, 4, num_spare_rows=6)
    tokens, requests = 3 * [np.zeros(50, np.int64)], 6 * [np.zeros(6, np.int64)]
    tables = np.zeros((6, states.block_tables.shape[1]), np.int32)
    arrays = [*tokens, np.zeros(7, np.int32), np.zeros(6, np.int32), tables, *requests, *requests[:3]]
    assert sum(-(-array.nbytes // 64) * 64 for array in arrays) <= step_num_bytes(states, 50)
