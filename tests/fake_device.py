"""A GPU that is none: what it is given runs late, stream by stream, in an order that only its events hold together.

Its tensors claim another device, so that every operation on them comes by here. Views are made at once; everything else
waits in the queue of its stream, and what it will write is full of NaN or senseless numbers until then. Queues move
only when somebody waits or asks, by a hostile policy: as little as possible beside what is waited for, or at random. So
a missing event, a pinned buffer that is reused too early, or a result that is read too early shows as wrong data, and
whatever would stop a real launch (reading a tensor, sizes that depend on data, copies of pageable memory) is an error
inside `no_waiting`. A captured graph is the list of what was given while it was captured, on the very same tensors;
since graphs share their memory, a replay first spoils what all graphs wrote.

Ops of `octavo.kernels` are one operation each, as kernels are (`fake_kernels`).
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from octavo.protocol.config import CacheConfig, Dtype
from octavo.worker.device import TORCH_DTYPES, MemoryBudget
from octavo.worker.step_upload import PackedUploader

aten = torch.ops.aten
DEVICE = torch.device("lazy", 0)  # a name that torch knows and has no code for
STREAMS = ("compute", "side")
BAD_NUMBER = -(2**33) - 7  # no token, row, slot or block
READING_OPS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.unique_dim, aten._unique2)
EMPTY_OPS = (aten.empty, aten.empty_strided, aten.new_empty, aten.empty_like, aten.new_empty_strided)
MIB = 2**20


class WaitedError(AssertionError):
    """The host waited for the device where it must not."""


class DeviceTensor(torch.Tensor):
    """A tensor in the memory of a FakeGpu; `content` is an ordinary tensor."""

    content: torch.Tensor
    gpu: FakeGpu

    @staticmethod
    def __new__(cls, content: torch.Tensor, gpu: FakeGpu) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
        )
        made.content, made.gpu = content, gpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        gpu = next(leaf.gpu for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return gpu.dispatch(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def content_of(tree: Any) -> Any:
    """Return `tree` with the contents of its device tensors."""
    return tree_map(lambda leaf: leaf.content if isinstance(leaf, DeviceTensor) else leaf, tree)


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what nobody can take for data."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    return tensor.fill_(BAD_NUMBER if tensor.dtype is torch.int64 else 77)


class _Factories(TorchDispatchMode):
    """Brings to the device what is made there without any tensor of it."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if kwargs.get("device") == DEVICE or any(isinstance(leaf, DeviceTensor) for leaf in leaves):
            return self.gpu.dispatch(func, args, kwargs)
        return func(*args, **kwargs)


class FakeEvent:
    """See `octavo.worker.device.Event`."""

    def __init__(self, gpu: FakeGpu, stream: str) -> None:
        self.gpu = gpu
        self.stream = stream
        self.is_done = False

    def query(self) -> bool:
        self.gpu.move_a_little()
        return self.is_done

    def synchronize(self) -> None:
        if not self.is_done:
            self.gpu.check_may_wait("an event")
            self.gpu.run_until(self)

    def wait(self) -> None:
        self.gpu.enqueue(self)


class FakeGraph:
    """The operations that were captured."""

    def __init__(self, gpu: FakeGpu, operations: list[Callable[[], object]]) -> None:
        self.gpu = gpu
        self.operations = operations

    def replay(self) -> None:
        self.gpu.enqueue(self._run)

    def _run(self) -> None:
        for tensor in self.gpu.graph_memory:
            spoil(tensor)
        for operation in self.operations:
            operation()


class FakeGpu:
    """Implements `octavo.worker.device.Device`. As a context manager: tensors can be made on it inside."""

    torch_device = DEVICE
    uses_host_memory = False
    has_graphs = True
    records_steps = False
    packs_weights = False

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.queues: dict[str, deque[Any]] = {stream: deque() for stream in STREAMS}
        self.stream = "compute"
        self.may_wait = True
        self.moves_by_itself = True
        self.captured: list[Callable[[], object]] | None = None
        self.graph_memory: list[torch.Tensor] = []
        self.pinned: dict[int, torch.Tensor] = {}  # kept, so that no other tensor gets their addresses
        self.num_run = 0
        self.num_copies_to_device = 0
        self.num_bytes_total = 1000 * MIB
        self.num_bytes_used = 100 * MIB
        self.peaks_bytes = deque([50 * MIB, 20 * MIB, 10 * MIB])  # largest step, longest decode, decode of the graphs
        self.graph_bytes = MIB
        self._factories = _Factories(self)

    def __enter__(self) -> FakeGpu:
        self._factories.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._factories.__exit__(*problem)

    # --- what is given to it

    def dispatch(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Do or queue one operation of torch."""
        with torch.inference_mode(False), _disable_current_modes():
            if func.overloadpacket in READING_OPS or self._moves_memory(func, args, kwargs):
                return self._move(func, args, kwargs)
            self._check_places(func, args)
            decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
            if _is_view(func):
                return self._wrap(func(*content_of(args), **content_of(kwargs)))
            if _writes(func):
                self.enqueue_call(func, args, kwargs)
                return args[0]
            result = self._allocate_results(func, args, kwargs)
            if func.overloadpacket not in EMPTY_OPS:
                self.enqueue_call(func, args, {**kwargs, **_on_host(kwargs)}, into=result)
            return result

    def allocate(self, *shape: int, dtype: torch.dtype) -> DeviceTensor:
        """Return a tensor without content."""
        with torch.inference_mode(False), _disable_current_modes():
            content = spoil(torch.empty(shape, dtype=dtype))
            if self.captured is not None:
                self.graph_memory.append(content)
            return DeviceTensor(content, self)

    def enqueue_call(self, func: Any, args: Any, kwargs: Mapping[str, Any], into: Any = None) -> None:
        """Queue a call whose result, if it has one, is copied to `into`."""
        args, kwargs, into = content_of(args), content_of(dict(kwargs)), content_of(into)

        def call() -> None:
            result = func(*args, **kwargs)
            if into is not None:
                for target, source in zip(_as_tuple(into), _as_tuple(result), strict=True):
                    target.copy_(source)

        self.enqueue(call)

    def enqueue(self, operation: Any) -> None:
        if self.captured is not None:
            self.captured.append(operation)
        else:
            self.queues[self.stream].append((operation, self.stream))

    def _moves_memory(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        if func.overloadpacket is aten.copy_:
            return isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
        if func.overloadpacket in (aten._to_copy, aten.to) and kwargs.get("device") is not None:
            return (kwargs["device"] == DEVICE) != isinstance(args[0], DeviceTensor)
        return False

    def _move(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Copy between host and device, late if the host's memory is pinned, else at once; or read the device."""
        if func.overloadpacket is aten.copy_:
            host = args[1] if isinstance(args[0], DeviceTensor) else args[0]
            if self._is_pinned(host) and (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                self.num_copies_to_device += host is args[1]
                self.enqueue_call(func, args, {})
                return args[0]
        self.check_may_wait(f"{func}")
        self.synchronize()
        result = func(*content_of(args), **{**kwargs, **_on_host(kwargs)})
        if func.overloadpacket is aten.copy_:
            return args[0]
        return DeviceTensor(result.clone(), self) if kwargs.get("device") == DEVICE else result

    def _check_places(self, func: Any, args: Any) -> None:
        """No operation takes tensors of both sides, but for single numbers."""
        for leaf in torch.utils._pytree.tree_leaves(args):
            is_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)
            if is_host and leaf.dim() > 0 and not self._is_pinned(leaf):
                self.check_may_wait(f"{func} of a tensor in host memory")

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def _allocate_results(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        def as_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

        kwargs = {**kwargs, **({"device": torch.device("meta")} if "device" in kwargs else {}), **_unpinned(kwargs)}
        shapes = func(*tree_map(as_meta, args), **tree_map(as_meta, kwargs))
        return tree_map(lambda meta: self.allocate(*meta.shape, dtype=meta.dtype), shapes)

    def _wrap(self, tree: Any) -> Any:
        return tree_map(lambda leaf: DeviceTensor(leaf, self) if isinstance(leaf, torch.Tensor) else leaf, tree)

    # --- how it runs

    def run_one(self, stream: str) -> bool:
        """Run the next operation of a stream; False when it has none or waits for another stream."""
        queue = self.queues[stream]
        if not queue:
            return False
        operation, _ = queue[0]
        if isinstance(operation, FakeEvent):
            if operation.stream != stream and not operation.is_done:
                return False
            operation.is_done |= operation.stream == stream
        else:
            with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                operation()
        queue.popleft()
        self.num_run += 1
        return True

    def run_until(self, event: FakeEvent) -> None:
        """Run as little else as possible, or anything at random, until `event` is done."""
        is_lazy = self.random.random() < 0.5
        while not event.is_done:
            stream = event.stream if is_lazy else self.random.choice(STREAMS)
            if not self.run_one(stream):
                self._unblock(stream)

    def _unblock(self, stream: str) -> None:
        queue = self.queues[stream]
        if queue and isinstance(queue[0][0], FakeEvent) and not self.run_one(stream):
            self.run_until(queue[0][0])

    def move_a_little(self) -> None:
        """Run a few operations of any stream."""
        for _ in range(self.random.choice((0, 0, 1, 10, 100)) if self.moves_by_itself else 0):
            self.run_one(self.random.choice(STREAMS))

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, whatever waits for the device raises WaitedError."""
        before, self.may_wait = self.may_wait, False
        try:
            yield
        finally:
            self.may_wait = before

    def check_may_wait(self, what: str) -> None:
        if not self.may_wait:
            raise WaitedError(f"the host waits for {what}")

    # --- Device

    def describe(self) -> str:
        return "a fake GPU"

    def select_dtype(self, asked: Dtype | None, stored: Dtype | None) -> tuple[torch.dtype, str]:
        return TORCH_DTYPES[asked or Dtype.FLOAT32], ""

    def select_kernels(self, is_deterministic: bool) -> dict[str, str]:
        import fake_kernels

        return fake_kernels.select()

    def free_bytes(self) -> int:
        return self.num_bytes_total - self.num_bytes_used

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        self.synchronize()
        return self.peaks_bytes.popleft()

    def kv_budget(self, cache: CacheConfig, free_bytes: int, reserved_bytes: int) -> MemoryBudget:
        share_bytes = int(self.num_bytes_total * cache.gpu_memory_utilization)
        num_bytes = share_bytes - self.num_bytes_used - reserved_bytes
        return MemoryBudget(num_bytes, reserved_bytes, self.free_bytes(), "the fake GPU", "get a real one")

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False), _disable_current_modes():
            tensor = spoil(torch.empty(shape, dtype=dtype))
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty_host(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)

    def make_uploader(self, num_bytes: int) -> PackedUploader:
        return PackedUploader(self, num_bytes)

    def record(self) -> FakeEvent:
        event = FakeEvent(self, self.stream)
        self.enqueue(event)
        return event

    @contextlib.contextmanager
    def on_side_stream(self) -> Iterator[None]:
        before, self.stream = self.stream, "side"
        try:
            yield
        finally:
            self.stream = before

    def synchronize(self) -> None:
        self.check_may_wait("everything")
        while any(self.queues.values()):
            stream = self.random.choice(STREAMS)
            if not self.run_one(stream):
                self._unblock(stream)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
        self.captured = []
        try:
            with self.no_waiting():
                result = run()
        finally:
            operations, self.captured = self.captured, None
        self.num_bytes_used += self.graph_bytes
        return FakeGraph(self, operations), result


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _writes(func: Any) -> bool:
    return any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}


def _unpinned(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"pin_memory": False} if "pin_memory" in kwargs else {}
