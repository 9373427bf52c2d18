"""How bfloat16 and fp32 weights are packed on the CPU, rows of an embedding, and what is refused."""

import cpu_kernels
import pytest
import torch
from kernel_checks import DTYPES, random_tensor

from octavo.kernels.cpu.packed_linear import (
    cpu_pack_rows,
    cpu_packed_embedding,
    cpu_packed_gated_linear,
    cpu_packed_linear,
    cpu_packed_num_bytes,
)
from octavo.kernels.ops.packed_linear import Activation, PackedWeight, WeightFormat

FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}


def empty_weight(num_outputs: int, num_inputs: int, dtype: torch.dtype, is_gated: bool = False) -> PackedWeight:
    num_bytes = cpu_packed_num_bytes(FORMATS[dtype], num_outputs, num_inputs, is_gated)
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    return PackedWeight(data, FORMATS[dtype], num_outputs, num_inputs, is_gated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_weight_may_come_in_any_pieces(executor, dtype: torch.dtype, is_gated: bool) -> None:
    rows = random_tensor(78, 35, dtype=dtype)
    whole = empty_weight(78, 35, dtype, is_gated)
    cpu_pack_rows(whole, 0, rows)
    for piece in (1, 5, 16, 50):
        weight = empty_weight(78, 35, dtype, is_gated)
        for first in reversed(range(0, 78, piece)):
            cpu_pack_rows(weight, first, rows[first : first + piece])
        assert torch.equal(weight.data, whole.data)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [1, 17, 48, 100])
def test_embedding_rows_to_the_bit(executor, weight_dtype: torch.dtype, dtype: torch.dtype, num_inputs: int) -> None:
    rows = random_tensor(70, num_inputs, dtype=weight_dtype)
    rows[3] = torch.inf
    weight = empty_weight(70, num_inputs, weight_dtype)
    cpu_pack_rows(weight, 0, rows)
    token_ids = torch.tensor([69, 0, 3, 31, 32, 33, 3, 63, 64])
    cpu_kernels.assert_same_bits([cpu_packed_embedding(token_ids, weight, dtype)], [rows[token_ids].to(dtype)])
    cpu_kernels.assert_replays(lambda ids: cpu_packed_embedding(ids, weight, dtype), [token_ids], (1, 4, 9))


@pytest.mark.parametrize("token_id", [-1, 70, 1 << 40])
def test_unknown_token_ids_are_index_errors(executor, token_id: int) -> None:
    weight = empty_weight(70, 32, torch.bfloat16)
    with pytest.raises(IndexError):
        cpu_packed_embedding(torch.tensor([0, token_id]), weight, torch.bfloat16)


def test_token_ids_in_another_dtype_are_refused(each_isa) -> None:
    with pytest.raises(ValueError, match="int64"):
        cpu_packed_embedding(torch.tensor([0], dtype=torch.int32), empty_weight(8, 8, torch.float32), torch.float32)


def test_rows_that_do_not_belong_are_refused(each_isa) -> None:
    weight = empty_weight(8, 8, torch.float32)
    with pytest.raises(IndexError, match="4 to 9"):
        cpu_pack_rows(weight, 4, torch.zeros(5, 8))
    with pytest.raises(IndexError):
        cpu_pack_rows(weight, -1, torch.zeros(5, 8))
    with pytest.raises(ValueError, match="bfloat16"):
        cpu_pack_rows(weight, 0, torch.zeros(5, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="8"):
        cpu_pack_rows(weight, 0, torch.zeros(5, 7))


def test_operands_that_do_not_fit_are_refused(each_isa) -> None:
    weight, gated = empty_weight(8, 8, torch.bfloat16), empty_weight(8, 8, torch.bfloat16, is_gated=True)
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x is"):
        cpu_packed_linear(x[:, :7], weight)
    with pytest.raises(ValueError, match="float32"):
        cpu_packed_linear(x.float(), weight)
    with pytest.raises(ValueError, match="bias"):
        cpu_packed_linear(x, weight, torch.zeros(7, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bias"):
        cpu_packed_linear(x, weight, torch.zeros(8))
    with pytest.raises(ValueError, match="is_gated"):
        cpu_packed_linear(x, gated)
    with pytest.raises(ValueError, match="is_gated"):
        cpu_packed_gated_linear(x, weight, Activation.SILU)
    with pytest.raises(ValueError, match="halves"):
        cpu_packed_num_bytes(WeightFormat.BFLOAT16, 7, 8, True)
