"""What is raised when the engine core contradicts itself.

Such an error ends the process: whatever it would decide next could hand one request's memory to another. `assert` is
not used, because `python -O` removes it.
"""

from __future__ import annotations


class InvariantError(RuntimeError):
    """A defect of ours, never the fault of a request."""


def require(holds: bool, rule: str) -> None:
    """Raise InvariantError with the text of `rule` unless it `holds`."""
    if not holds:
        raise InvariantError(rule)
