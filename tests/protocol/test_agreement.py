"""What nodes must agree on, and the secret that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.protocol.agreement import COMPARED_SECTIONS, OWN_FIELDS, agreement_of, difference, missing_nodes
from octavo.protocol.cluster_key import key_between_nodes, read_cluster_key, write_cluster_key
from octavo.protocol.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WeightsFormat,
)
from octavo.protocol.lifecycle import ExitCode, StartupError


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    model = ModelConfig(
        path=str(tmp_path),
        weights_path=str(tmp_path),
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=("m",),
        max_model_len=64,
        vocab_size=100,
    )
    parallel = ParallelConfig(tensor_parallel_size=2, num_nodes=2, master_address="a", cluster_key_file="key")
    return EngineConfig(model=model, ipc_directory="/a", parallel=parallel)


def changed(config: EngineConfig, section: str, **fields: Any) -> EngineConfig:
    return msgspec.structs.replace(config, **{section: msgspec.structs.replace(getattr(config, section), **fields)})


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("cache", {"block_size": 32}),
        ("scheduler", {"max_num_seqs": 3}),
        ("scheduler", {"max_num_batched_tokens": 999}),
        ("model", {"max_model_len": 65}),
        ("model", {"dtype": "float32"}),
        ("model", {"vocab_size": 101}),
        ("parallel", {"tensor_parallel_size": 4}),
        ("parallel", {"deterministic": True}),
    ],
)
def test_a_difference_that_matters_is_named_with_both_values(
    config: EngineConfig, section: str, fields: dict[str, Any]
) -> None:
    other = changed(config, section, **fields)
    ((name, value),) = fields.items()
    found = difference(agreement_of(config), agreement_of(other), node=3)
    plain = getattr(getattr(config, section), name)
    assert found.startswith(f"{name} is {value} on node 3 and {'the default' if plain is None else plain} on node 0")


def test_what_is_a_nodes_own_affair_may_differ(config: EngineConfig) -> None:
    other = changed(config, "parallel", node_rank=1, master_address="b", num_threads=3, cluster_key_file="elsewhere")
    other = changed(other, "cache", gpu_memory_utilization=0.5, num_device_blocks=7)
    other = msgspec.structs.replace(other, ipc_directory="/b", api=msgspec.structs.replace(other.api, port=1))
    assert difference(agreement_of(config), agreement_of(other), node=1) == ""


def test_every_field_that_is_named_exists() -> None:
    sections = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
    assert set(sections) == set(COMPARED_SECTIONS)
    known = {field.name for section in sections.values() for field in msgspec.structs.fields(section)}
    assert known > OWN_FIELDS


def test_another_model_and_another_version_are_differences(config: EngineConfig, tmp_path: Path) -> None:
    ours = agreement_of(config)
    (tmp_path / "config.json").write_text('{"hidden_size": 9}')
    assert difference(ours, agreement_of(config), node=1).startswith("config.json is SHA-256 ")
    assert difference(ours, {**ours, "protocol version": "0"}, node=1).startswith("protocol version is 0 on node 1")
    assert difference(ours, {**ours, "new": "1"}, node=1).startswith("new is 1 on node 1 and not known on node 0")
    (tmp_path / "config.json").unlink()
    with pytest.raises(StartupError, match=r"cannot read .*config\.json"):
        agreement_of(config)


def test_who_is_missing_in_words() -> None:
    assert missing_nodes([1], [2, 3], 60).startswith("no sign of node 1 (workers 2, 3) within 60 s")
    assert missing_nodes([1, 2], [1, 2], 0.5).startswith("no sign of nodes 1, 2 (workers 1, 2) within 0.5 s")


def test_one_file_gives_every_node_the_same_key(tmp_path: Path) -> None:
    write_cluster_key(tmp_path / "key")
    write_cluster_key(tmp_path / "other")
    assert read_cluster_key(tmp_path / "key") == read_cluster_key(tmp_path / "key")
    assert read_cluster_key(tmp_path / "key") != read_cluster_key(tmp_path / "other")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o666])
def test_a_key_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    write_cluster_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(StartupError, match="chmod 600"):
        read_cluster_key(tmp_path / "key")


@pytest.mark.parametrize("content", [b"", b"secret", b"x" * 5000, bytes(40), b"\xff" * 40])
def test_a_file_that_holds_no_key_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(StartupError, match="is no cluster key") as caught:
        read_cluster_key(path)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "secret" not in caught.value.message
    with pytest.raises(StartupError, match="cannot read"):
        read_cluster_key(tmp_path / "nowhere")


def test_one_node_needs_no_key() -> None:
    assert key_between_nodes(ParallelConfig(cluster_key_file="/nowhere")) is None
