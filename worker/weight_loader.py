"""From a checkpoint to a model with its weights, one tensor at a time.

Order: read the headers, decide which weights are held in blocks, compare with a model on the meta device (names,
shapes, dtypes), see that the memory is there, allocate, copy. So whatever is wrong with the files is said before memory
is taken, and the peak is this rank's weights plus some rows of one tensor: tensors are read in pieces, of a file only
what the rank holds, and files are mapped no longer than the loading lasts. A tensor that the model does not want is an
error too: it is the usual sign of a config.json that belongs to another model.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator

import torch

from octavo.protocol.config import ModelConfig, WeightsFormat
from octavo.worker.device import check_fits, explain_out_of_memory
from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.gguf_file import open_gguf
from octavo.worker.layers.weight_slot import WeightSlot
from octavo.worker.models.config import LlamaConfig
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.models.registry import build_model
from octavo.worker.quantize import quantize_rows
from octavo.worker.safetensors_files import open_safetensors
from octavo.worker.stored_tensor import StoredTensor, bad_weights
from octavo.worker.weight_formats import check_quantization, choose_formats, describe_widening

logger = logging.getLogger(__name__)

PIECE_NUM_WEIGHTS = 1 << 22  # 16 MiB as fp32
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


def _pieces(num_rows: int, row_num_weights: int, row_multiple: int) -> Iterator[range]:
    """Cut rows into runs of about PIECE_NUM_WEIGHTS weights, in multiples of `row_multiple`."""
    num_multiples = max(1, PIECE_NUM_WEIGHTS // max(1, row_num_weights * row_multiple))
    length = num_multiples * row_multiple
    return (range(first, min(first + length, num_rows)) for first in range(0, num_rows, length))


def _fill(slot: WeightSlot, stored: StoredTensor) -> None:
    """Bring the rows of a tensor to the layer that wants them, in the form in which it does."""
    rows = range(slot.shape[0]) if slot.rows is None else slot.rows
    for piece in _pieces(len(rows), math.prod(slot.shape[1:]), stored.row_multiple):
        wanted = rows[piece.start : piece.stop]
        if slot.blocks is None:
            slot.load(piece.start, stored.read(wanted))
        elif stored.read_blocks is not None:
            slot.load(piece.start, stored.read_blocks(wanted))
        else:
            slot.load(piece.start, quantize_rows(stored.read(wanted), slot.blocks))


@torch.inference_mode()
def load_model(
    model_config: ModelConfig,
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
    free_bytes: int | None = None,
    packs_weights: bool = False,
) -> LlamaForCausalLM:
    """Return this rank's share of the model with its weights, when every rank has its own.

    Args:
        free_bytes: what the device has for it; None asks the host.
        packs_weights: the device's kernels have layouts of their own for weights, blocks among them.

    Raises StartupError: BAD_WEIGHTS naming file and tensor, OUT_OF_MEMORY when the weights do not fit, USAGE when the
    model cannot be split over so many ranks or the device cannot hold its weights as asked; RankLostError when another
    rank does not come so far.
    """
    check_quantization(model_config.quantization, packs_weights)
    tensors = open_checkpoint(model_config, config)
    block_format_of = choose_formats(model_config, tensors) if packs_weights else None
    if block_format_of is None and (widened := describe_widening(tensors)):
        logger.info("weights in %s are widened, because no kernels here multiply them as they are", widened)
    sizes = (config, model_config.max_model_len, dtype)
    blueprint = build_model(*sizes, torch.device("meta"), group, block_format_of)
    check_checkpoint(blueprint.weight_slots(), tensors, config, model_config.weights_path)
    needed_bytes = weights_num_bytes(blueprint)
    check_fits("the weights", needed_bytes, LOWER_WEIGHTS, free_bytes)
    with explain_out_of_memory("the weights", needed_bytes, LOWER_WEIGHTS, free_bytes):
        model = build_model(*sizes, device, group, block_format_of)
        for slot in model.weight_slots():
            _fill(slot, tensors.pop(slot.name))
    group.barrier(LOADING_TIMEOUT_S)
    return model
