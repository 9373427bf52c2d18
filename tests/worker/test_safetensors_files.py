"""Safetensors as written by the library of that name; and each way in which a file can be broken."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import tiny_llama
import torch
from safetensors.torch import load_file, save_file

from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.models.config import read_config
from octavo.worker.safetensors_files import INDEX_FILE, SINGLE_FILE, open_safetensors
from octavo.worker.weight_loader import load_model

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c.weight": torch.arange(6, dtype=torch.float16).view(2, 3),
    "d": torch.arange(3, dtype=torch.int64),
}


def write(path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refusal(directory) -> str:
    with pytest.raises(StartupError) as caught:
        open_safetensors(str(directory))
    assert caught.value.exit_code is ExitCode.BAD_WEIGHTS
    assert "\n" not in caught.value.message
    return caught.value.message


def test_tensors_come_back_as_they_were_written(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    tensors = open_safetensors(str(tmp_path))
    assert tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert (tensors[name].shape, tensors[name].dtype) == (tuple(expected.shape), expected.dtype)
        assert torch.equal(tensors[name].read(), expected)
        assert str(tmp_path / SINGLE_FILE) in tensors[name].origin


def test_an_unaligned_header_is_read(tmp_path):
    values = torch.tensor([1.5, -2.0])
    for padding in range(4):
        header = {"x" * (padding + 1): {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        write(tmp_path / SINGLE_FILE, header, values.numpy().tobytes())
        (stored,) = open_safetensors(str(tmp_path)).values()
        assert torch.equal(stored.read(), values)


def test_a_file_of_another_name_is_found(tmp_path):
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    assert open_safetensors(str(tmp_path)).keys() == TENSORS.keys()


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "num_bytes", "words"),
    [
        ({"t": ENTRY}, 4, "tensor t ends at byte 8 of the data, the file holds 4: it is truncated"),
        ({"t": ENTRY}, 9, "1 bytes behind the last tensor"),
        ({"t": {**ENTRY, "shape": [3]}}, 8, "tensor t of F32 [3] needs 12 bytes"),
        ({"t": {**ENTRY, "dtype": "F16"}}, 8, "tensor t of F16 [2] needs 4 bytes"),
        ({"t": {**ENTRY, "dtype": "Q9"}}, 8, "tensor t has dtype Q9"),
        ({"t": {**ENTRY, "data_offsets": [8, 0]}}, 8, "tensor t"),
        ({"t": {**ENTRY, "data_offsets": [-8, 0]}}, 8, "tensor t"),
        ({"t": {**ENTRY, "data_offsets": [4, 12]}}, 12, "tensor t begins at byte 4 of the data, expected 0"),
        ({"t": {**ENTRY, "shape": [-2]}}, 8, "tensor t"),
        ({"t": {"dtype": "F32"}}, 8, "tensor t"),
        ({"t": ENTRY, "u": ENTRY}, 8, "tensor u begins at byte 0 of the data, expected 8"),
        ({"t": 7}, 8, "tensor t"),
        ([], 8, "the header is not valid"),
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused(tmp_path, header, num_bytes, words):
    write(tmp_path / SINGLE_FILE, header, bytes(num_bytes))
    message = refusal(tmp_path)
    assert words in message
    assert SINGLE_FILE in message


@pytest.mark.parametrize("data", [b"", b"\x01", bytes(8), b"\xff" * 8, struct.pack("<Q", 2) + b"{"])
def test_a_file_without_a_whole_header_is_refused(tmp_path, data):
    (tmp_path / SINGLE_FILE).write_bytes(data)
    assert SINGLE_FILE in refusal(tmp_path)


def test_a_missing_checkpoint_is_refused(tmp_path):
    assert "no model.safetensors" in refusal(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    """A tiny model in several shards."""
    tiny_llama.save(tiny_llama.build(), tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_shards_load_like_one_file(sharded, tmp_path_factory):
    whole = tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("whole"))
    parameters = []
    for directory in (sharded, whole):
        config = tiny_llama.engine_config(directory).model
        model = load_model(config, read_config(config.path), torch.float32, torch.device("cpu"))
        parameters.append(dict(model.named_parameters()))
    assert parameters[0].keys() == parameters[1].keys()
    for name, parameter in parameters[0].items():
        assert torch.equal(parameter, parameters[1][name])


def test_a_missing_shard_is_named_with_a_tensor_of_it(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    name = next(iter(load_file(shard)))
    shard.unlink()
    message = refusal(sharded)
    assert f"{shard.name} is missing" in message
    index = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    assert any(f"tensor {name}" in message for name, file in index.items() if file == shard.name), name


def test_a_truncated_shard_is_named_with_its_tensor(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    message = refusal(sharded)
    assert shard.name in message
    assert "tensor model." in message
    assert "truncated" in message


def change_index(directory, change) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


def test_a_tensor_that_only_the_index_knows_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0].name
    change_index(sharded, lambda weight_map: weight_map.update({"model.phantom": shard}))
    assert "tensor model.phantom is missing" in refusal(sharded)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/file.safetensors"])
def test_the_index_cannot_point_out_of_the_directory(sharded, name):
    change_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": name}))
    assert "is not the name of a file beside it" in refusal(sharded)


def test_a_broken_index_is_refused(sharded):
    (sharded / INDEX_FILE).write_text('{"weight_map": [')
    assert INDEX_FILE in refusal(sharded)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("one", "two"):
        save_file({"t": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    message = refusal(tmp_path)
    assert "one.safetensors" in message
    assert "two.safetensors" in message


def test_every_flipped_bit_of_the_header_is_refused_or_harmless(tmp_path):
    """A changed header is refused when it is read, or it changes a name, shape or dtype, which the model refuses."""
    path = tmp_path / SINGLE_FILE
    save_file({"first": torch.ones(2, 3), "second": torch.ones(4)}, path)
    original = path.read_bytes()
    wanted = {"first": ((2, 3), torch.float32), "second": ((4,), torch.float32)}
    header_length = struct.unpack("<Q", original[:8])[0]
    silently_accepted = []
    for bit in range(8 * (8 + header_length)):
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            tensors = open_safetensors(str(tmp_path))
        except StartupError:
            continue
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if found == wanted and not all((tensor.read() == 1).all() for tensor in tensors.values()):
            silently_accepted.append(bit)
    assert not silently_accepted


def resident_bytes(path):
    """Bytes of this process's mapping of the file that are in memory."""
    smaps = Path("/proc/self/smaps").read_text()
    mapping = smaps[smaps.index(str(path)) :]
    return 1024 * int(re.search(r"Rss:\s+(\d+) kB", mapping)[1])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_rows_that_are_not_asked_for_are_not_read(tmp_path):
    path = tmp_path / SINGLE_FILE
    values = torch.arange(8 << 20, dtype=torch.float32).view(1 << 10, -1)
    save_file({"t": values}, path)
    stored = open_safetensors(str(tmp_path))["t"]
    rows = range(256, 512)
    assert torch.equal(stored.read(rows).clone(), values[256:512])
    assert values.nbytes // 4 <= resident_bytes(path) < values.nbytes // 2
    assert torch.equal(stored.read().clone(), values)
    assert resident_bytes(path) >= values.nbytes
