"""Runners for the check of a GPU: of the real model, or of a made-up one whose weights never were a file."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from embedded_model import EMBEDDED_MODEL, locate_model
from gpu_part import Options
from tokenizers import Tokenizer

from octavo.protocol.config import (
    CacheConfig,
    DeviceKind,
    Dtype,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WeightsFormat,
)
from octavo.protocol.lifecycle import Reporter
from octavo.protocol.worker_messages import WorkerReady
from octavo.worker import worker
from octavo.worker.distributed import TensorParallelGroup
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import LlamaConfig, read_config
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.models.registry import build_model

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at a lower temperature on a mountain because",
)


class Model(NamedTuple):
    """A model to run; `weights_path` is empty for one whose weights are made up on the device."""

    directory: str
    weights_path: str
    weights_format: WeightsFormat
    config: LlamaConfig


def made_up_model(sizes: dict[str, Any]) -> Model:
    """A model of these sizes, of which only the config.json exists."""
    directory = tempfile.mkdtemp(prefix="octavo-gpu-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    content = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **sizes}
    (Path(directory) / "config.json").write_text(json.dumps(content))
    return Model(directory, "", WeightsFormat.SAFETENSORS, read_config(directory))


def checked_model(options: Options) -> Model:
    """The model whose answers are compared: the real one, or a tiny one for trying out the check."""
    if options.is_tiny:
        return made_up_model(TINY)
    location = locate_model(options.model or EMBEDDED_MODEL)
    directory = str(location.path)
    return Model(directory, str(location.weights_path), location.weights_format, read_config(directory))


def prompts_for(model: Model) -> list[list[int]]:
    """Token ids of TEXTS, or as many random ones for a model without a tokenizer."""
    if not model.weights_path:
        return [random_tokens(model, 5 + 9 * index, index) for index in range(len(TEXTS))]
    tokenizer = Tokenizer.from_file(str(Path(model.directory) / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def random_tokens(model: Model, length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(model.config.vocab_size), k=length)


def engine_config(
    model: Model,
    device: DeviceKind,
    *,
    dtype: Dtype | None = None,
    max_model_len: int = 512,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    cache: CacheConfig | None = None,
    **parallel: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path=model.directory,
            weights_path=model.weights_path or model.directory,
            weights_format=model.weights_format,
            served_model_names=("checked",),
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            dtype=dtype,
        ),
        ipc_directory=model.directory,
        cache=cache or CacheConfig(num_device_blocks=2048, num_host_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        parallel=ParallelConfig(device=device, **parallel),
    )


@torch.inference_mode()
def make_up_weights(
    model_config: ModelConfig,
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorParallelGroup,
    free_bytes: int | None = None,
    packs_weights: bool = False,
) -> LlamaForCausalLM:
    """In place of `load_model`: weights of the size of trained ones, the same for every dtype where they are few."""
    model = build_model(config, model_config.max_model_len, dtype, device, group)
    is_small = sum(parameter.numel() for parameter in model.parameters()) < 10**7
    generator = torch.Generator("cpu" if is_small else device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            drawn = torch.empty(parameter.shape, device=generator.device, dtype=torch.float32 if is_small else dtype)
            parameter.copy_(drawn.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator))
    return model


def build_runner(model: Model, config: EngineConfig) -> tuple[ModelRunner, WorkerReady]:
    """Start a worker's runner in this process; what it reports goes nowhere."""
    with Path(os.devnull).open("wb") as nowhere:
        reporter = Reporter(nowhere.fileno())
        if model.weights_path:
            return worker.build_runner(config, model.config, reporter)
        with mock.patch.object(worker, "load_model", make_up_weights):
            return worker.build_runner(config, model.config, reporter)
