"""config.json as people have it: every form that means something, and a clear refusal of the rest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from octavo.protocol.config import Dtype
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.models.config import read_config
from octavo.worker.models.rope_config import RopeType

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(directory, **changes):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(str(directory))


def test_defaults_are_those_of_the_file_format(tmp_path):
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.rope_type) == (1e-6, 10000.0, RopeType.DEFAULT)
    assert not any((config.tie_word_embeddings, config.attention_bias, config.mlp_bias))
    assert config.dtype is None


def test_null_is_absent(tmp_path):
    config = read(tmp_path, num_key_value_heads=None, head_dim=None, rope_scaling=None, torch_dtype=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


def test_head_dim_may_be_explicit(tmp_path):
    assert read(tmp_path, head_dim=24, hidden_size=66).head_dim == 24


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_dtype_in_both_forms(tmp_path, key, prefix):
    assert read(tmp_path, **{key: f"{prefix}bfloat16"}).dtype is Dtype.BFLOAT16


def test_rope_theta_in_both_forms(tmp_path):
    assert read(tmp_path, rope_theta=5e5).rope.theta == 5e5
    assert read(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope.theta == 5e5
    assert read(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}).rope.theta == 5e5


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3"])
def test_rope_scaling_in_both_forms(tmp_path, key, rope_type):
    scaling = {key: rope_type, **LLAMA3}
    old = read(tmp_path, rope_theta=5e5, rope_scaling=scaling).rope
    new = read(tmp_path, rope_parameters={"rope_theta": 5e5, **scaling}).rope
    assert old == new
    assert (old.rope_type, old.factor) == (rope_type, 8.0)


def test_dynamic_scaling_starts_from_the_length_of_the_model(tmp_path):
    rope = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2}, max_position_embeddings=512).rope
    assert rope.original_max_position_embeddings == 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LLamaForCausalM"]}, "LLamaForCausalM is not supported (nearest: LlamaForCausalLM)"),
        ({"architectures": ["BertModel"]}, "supported: LlamaForCausalLM"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": "absent"}, "names no architecture"),
        ({"architectures": [7]}, "Expected `str`"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"torch_dtype": "int8"}, "dtype int8"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope type linear needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "below high_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type (full_attention)"),
    ],
)
def test_what_we_cannot_run_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(StartupError) as caught:
        read(tmp_path, **changes)
    assert caught.value.exit_code is ExitCode.UNSUPPORTED_MODEL
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"architectures": "LlamaForCausalLM"}'])
def test_a_file_that_is_not_a_config_is_refused(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(StartupError) as caught:
        read_config(str(tmp_path))
    assert caught.value.exit_code is ExitCode.UNSUPPORTED_MODEL


def test_a_missing_file_is_a_missing_model(tmp_path):
    with pytest.raises(StartupError) as caught:
        read_config(str(tmp_path))
    assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND
    assert str(tmp_path / "config.json") in caught.value.message


def test_reading_needs_no_torch():
    program = "import sys, octavo.worker.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
