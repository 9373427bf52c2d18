"""Triton's interpreter, made to compute what a GPU computes; `install` repairs it, once per process.

What the stock interpreter (3.6 to 3.9) gets wrong without a word, and what is done here:
- bf16 is held as 16 bits that are never decoded, and fp8 codes for NaN decode to numbers: operands of `tl.dot` are
  decoded to fp32, and all other arithmetic, comparisons and reductions on these types are refused: a kernel writes
  `.to(tl.float32)`.
- fp32 to bf16 truncates, to fp8 loses carries and does not saturate: casts to them go through torch, which rounds to
  nearest even, and saturate as the GPU's instructions do.
- `tl.dot` of fp32 is exact where the GPU takes 10 bits of mantissa (tf32, unless the kernel asks for "ieee"): operands
  are cut likewise.
- loads and stores go to whatever address they compute: see `triton_memory_checks`.

Nothing but the interpreter's own classes is changed. Rejected: subclassing its builder, because its module keeps the
one instance that everything uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton_memory_checks import MemoryChecks, MemoryFault

TORCH_DTYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
ENCODED_DTYPES = (*TORCH_DTYPES, tl.float8e4b15)  # numpy holds these as bits
TF32_MASK = np.uint32(0xFFFFE000)
UNARY = ("create_fabs", "create_erf", "create_rsqrt", "unary_op")
BINARY = ("create_idiv", "binary_op")
TERNARY = ("create_fma", "create_clampf")


class UnsupportedArithmeticError(TypeError):
    """Arithmetic on a type that the interpreter holds as bits."""


def decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Values of the interpreter's storage: fp32 for an encoded dtype, `data` itself for all others."""
    if dtype not in ENCODED_DTYPES:
        return data
    bits = np.array(data).view(np.int16 if data.itemsize == 2 else np.uint8)
    return torch.from_numpy(bits).view(TORCH_DTYPES[dtype]).float().numpy()


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Storage of `values` (fp32 or fp64) in an encoded dtype: nearest even; fp8 saturates, NaN stays NaN."""
    torch_dtype = TORCH_DTYPES[dtype]
    tensor = torch.from_numpy(np.array(values))
    if torch_dtype.itemsize == 1:
        largest = torch.finfo(torch_dtype).max
        tensor = torch.where(tensor.isnan(), tensor, tensor.clamp(-largest, largest))
    bits = tensor.to(torch_dtype).view(torch.int16 if torch_dtype.itemsize == 2 else torch.uint8)
    return bits.numpy().view(interpreter._get_np_dtype(dtype))


def cast(source: TensorHandle, destination: tl.dtype) -> TensorHandle:
    """What every conversion of a value becomes.

    A comparison's result has the dtype of its operands but holds booleans: equal dtypes are no reason to do nothing.
    """
    from_dtype, to_dtype = source.dtype.scalar, destination.scalar
    data = decode(source.data, from_dtype)
    if to_dtype in ENCODED_DTYPES:
        if from_dtype == to_dtype:
            return TensorHandle(source.data, to_dtype)
        data = encode(data if data.dtype == np.float64 else data.astype(np.float32), to_dtype)
    else:
        data = data.astype(interpreter._get_np_dtype(to_dtype))
    return TensorHandle(data.reshape(source.data.shape), to_dtype)


def create_fp_to_fp(builder: InterpreterBuilder, source: TensorHandle, dtype: tl.dtype, rounding: Any) -> TensorHandle:
    if rounding not in (None, ir.ROUNDING_MODE.RTNE):
        raise UnsupportedArithmeticError(f"conversion to {dtype.scalar} with {rounding}: only to nearest is checked")
    return cast(source, dtype)


def as_operand(handle: TensorHandle, accumulator: np.dtype, precision: Any) -> np.ndarray:
    data = decode(handle.data, handle.dtype.scalar)
    if data.dtype == np.float32 and precision == ir.INPUT_PRECISION.TF32:
        data = (np.array(data).view(np.uint32) & TF32_MASK).view(np.float32)
    return data.astype(accumulator)


def create_dot(
    builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, c: TensorHandle, precision: Any, imprecise: int
) -> TensorHandle:
    result_dtype = c.data.dtype
    accumulator = np.dtype(np.float32) if result_dtype == np.float16 else result_dtype
    product = np.matmul(as_operand(a, accumulator, precision), as_operand(b, accumulator, precision))
    return TensorHandle((product + c.data).astype(result_dtype), c.dtype.scalar)


def refuse_encoded(name: str, num_operands: int) -> Callable[..., TensorHandle]:
    original = getattr(InterpreterBuilder, name)

    def checked(builder: InterpreterBuilder, *args: Any, **kwargs: Any) -> TensorHandle:
        for handle in args[:num_operands]:
            refuse_encoded_dtype(handle.dtype, name)
        return original(builder, *args, **kwargs)

    return checked


def refuse_encoded_dtype(dtype: tl.dtype, operation: str) -> None:
    if not dtype.is_ptr() and dtype.scalar in ENCODED_DTYPES:
        raise UnsupportedArithmeticError(f"{operation} on {dtype.scalar}: write .to(tl.float32) first")


def repair_arithmetic() -> None:
    InterpreterBuilder.cast_impl = lambda builder, source, dtype: cast(source, dtype)
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
    for num_operands, names in enumerate((UNARY, BINARY, TERNARY), start=1):
        for name in names:
            setattr(InterpreterBuilder, name, refuse_encoded(name, num_operands))

    check_tensor = interpreter.ReduceScanOpInterface.check_tensor

    def check_reduced(reduction: Any, tensors: tuple[tl.tensor, ...]) -> None:
        for tensor in tensors:
            refuse_encoded_dtype(tensor.dtype, "reduction or scan")
        check_tensor(reduction, tensors)

    interpreter.ReduceScanOpInterface.check_tensor = check_reduced


def check_memory(checks: MemoryChecks) -> None:
    """Every access of a kernel passes `checks` before it happens; a launch tells them its tensors."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas
    call = interpreter.GridExecutor.__call__

    def checked_load(builder: Any, pointers: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
        checks.load(builder, pointers, mask.data)
        return load(builder, pointers, mask, *rest)

    def checked_store(
        builder: Any, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any
    ) -> None:
        checks.store(builder, pointers, mask.data)
        store(builder, pointers, value, mask, *rest)

    def checked_rmw(
        builder: Any, operation: Any, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any
    ) -> TensorHandle:
        refuse_encoded_dtype(value.dtype, "atomic operation")
        checks.atomic(builder, pointers, mask.data)
        return rmw(builder, operation, pointers, value, mask, *rest)

    def checked_cas(builder: Any, pointers: TensorHandle, *rest: Any) -> TensorHandle:
        checks.atomic(builder, pointers, np.ones(pointers.data.shape, bool))
        return cas(builder, pointers, *rest)

    def checked_call(executor: Any, *args: Any, **kwargs: Any) -> None:
        checks.start_launch({**dict(zip(executor.arg_names, args, strict=False)), **kwargs})
        try:
            call(executor, *args, **kwargs)
        except InterpreterError as error:
            raise_what_was_found(error)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store
    InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas = checked_rmw, checked_cas
    interpreter.GridExecutor.__call__ = checked_call


def raise_what_was_found(error: InterpreterError) -> None:
    """The interpreter wraps an exception once per call of a device function; a finding is raised as itself."""
    cause: BaseException | None = error
    while isinstance(cause, InterpreterError):
        cause = cause.__cause__
    if isinstance(cause, MemoryFault | UnsupportedArithmeticError):
        raise cause
    raise error


CHECKS = MemoryChecks()


def install() -> None:
    """Repair the interpreter and switch the memory checks on; a second call changes nothing."""
    if InterpreterBuilder.create_dot is not create_dot:
        repair_arithmetic()
        check_memory(CHECKS)
