"""From a checkpoint to a model with its weights, one tensor at a time.

Order: read the headers, compare them with a model on the meta device (names, shapes, dtypes), see that the memory is
there, allocate, copy. So whatever is wrong with the files is said before memory is taken, and the peak is this rank's
weights plus one tensor of the host's memory; of a file, only what the rank holds is read. A tensor that the model does
not want is an error too: it is the usual sign of a config.json that belongs to another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from octavo.protocol.config import ModelConfig, WeightsFormat
from octavo.worker.device import check_fits, explain_out_of_memory
from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.gguf_file import open_gguf
from octavo.worker.layers.weight_slot import WeightSlot
from octavo.worker.models.config import LlamaConfig
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.models.registry import build_model
from octavo.worker.safetensors_files import open_safetensors
from octavo.worker.stored_tensor import StoredTensor, bad_weights

READABLE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BUFFERS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")  # computed, yet stored by old versions
TIED_HEAD = "lm_head.weight"
LOADING_TIMEOUT_S = 3600.0  # ranks read from disks of different speeds; nobody steps before the last one is there
LOWER_WEIGHTS = "use a smaller model or --dtype bfloat16"


def open_checkpoint(model_config: ModelConfig, config: LlamaConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the checkpoint by their Hugging Face names; raises StartupError(BAD_WEIGHTS)."""
    if model_config.weights_format is WeightsFormat.GGUF:
        return open_gguf(model_config.path, model_config.weights_path, config)
    return open_safetensors(model_config.weights_path)


def _is_ignored(name: str, config: LlamaConfig) -> bool:
    return BUFFERS.fullmatch(name) is not None or (config.tie_word_embeddings and name == TIED_HEAD)


def check_checkpoint(
    slots: Iterable[WeightSlot], tensors: dict[str, StoredTensor], config: LlamaConfig, source: str
) -> None:
    """Raise StartupError(BAD_WEIGHTS) unless `tensors` are those that `slots` want, in shape and dtype."""
    wanted = {slot.name: slot for slot in slots}
    for name, slot in wanted.items():
        stored = tensors.get(name)
        if stored is None:
            raise bad_weights(f"{source}: tensor {name} {list(slot.shape)} is missing")
        if stored.shape != slot.shape:
            raise bad_weights(
                f"{stored.origin} has shape {list(stored.shape)}, config.json asks for {list(slot.shape)}"
            )
        if stored.dtype not in READABLE_DTYPES:
            raise bad_weights(f"{stored.origin} has dtype {stored.dtype}, which is not supported")
    for name, stored in tensors.items():
        if name not in wanted and not _is_ignored(name, config):
            raise bad_weights(f"{stored.origin} is not part of the model that config.json describes")


def weights_num_bytes(model: LlamaForCausalLM) -> int:
    """Return the bytes of all parameters, a tied one counted once."""
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.inference_mode()
def load_model(
    model_config: ModelConfig,
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
    free_bytes: int | None = None,
) -> LlamaForCausalLM:
    """Return this rank's share of the model with its weights, when every rank has its own.

    `free_bytes` is what the device has for it; None asks the host.

    Raises StartupError: BAD_WEIGHTS naming file and tensor, OUT_OF_MEMORY when the weights do not fit, USAGE when the
    model cannot be split over so many ranks; RankLostError when another rank does not come so far.
    """
    tensors = open_checkpoint(model_config, config)
    blueprint = build_model(config, model_config.max_model_len, dtype, torch.device("meta"), group)
    check_checkpoint(blueprint.weight_slots(), tensors, config, model_config.weights_path)
    needed_bytes = weights_num_bytes(blueprint)
    check_fits("the weights", needed_bytes, LOWER_WEIGHTS, free_bytes)
    with explain_out_of_memory("the weights", needed_bytes, LOWER_WEIGHTS, free_bytes):
        model = build_model(config, model_config.max_model_len, dtype, device, group)
        for slot in model.weight_slots():
            slot.load(tensors.pop(slot.name).read(slot.rows))
    group.barrier(LOADING_TIMEOUT_S)
    return model
