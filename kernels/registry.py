"""Which implementation of an op runs: the torch reference, or a backend made for the device.

Invariant: an op has one signature, that of its torch reference, which is its specification. A process serves one
device, so it chooses once, at its start, by `select`; until then every op is its reference. Rejected: choosing per
call by the tensor's device (a hidden branch in the hot path, and a wrong choice would never be seen).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

REFERENCE = "torch"


class Op(Generic[Parameters, Result]):
    """A callable that runs the implementation that was selected for it."""

    def __init__(self, reference: Callable[Parameters, Result]) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.implementations = {REFERENCE: reference}
        self.chosen = reference

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self.chosen(*args, **kwargs)

    def select(self, backends: Sequence[str]) -> str:
        """Take the first of `backends` that implements this op, or else the reference; return its name."""
        name = next((name for name in backends if name in self.implementations), REFERENCE)
        self.chosen = self.implementations[name]
        return name


_OPS: dict[str, Op[..., Any]] = {}


def op(reference: Callable[Parameters, Result]) -> Op[Parameters, Result]:
    """Declare an op; the decorated function is its torch reference."""
    declared = Op(reference)
    _OPS[declared.name] = declared
    return declared


def backend(
    name: str, implements: Op[Parameters, Result]
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Register the decorated function as what backend `name` runs for the op `implements`."""

    def register(implementation: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        implements.implementations[name] = implementation
        return implementation

    return register


def select(*backends: str) -> dict[str, str]:
    """Choose for every declared op the first of `backends` that implements it, or else the reference.

    Backends must have been imported. Call it once, before the first step; `select()` chooses every reference.

    Returns:
        The choice, op name -> backend name, for the log of the start.
    """
    return {name: declared.select(backends) for name, declared in _OPS.items()}
