"""Importing this module registers every GPU implementation with its op; `registry.select` then chooses among them.

A kernel that is not imported here does not exist for a worker, so each module of this package with an implementation
has its line. Rejected: importing whatever lies in the package (what runs should be readable in one place).
"""

from octavo.kernels.triton import activation, attention, kv_cache, linear, moe, norm, philox, rotary, sampling

__all__ = ["activation", "attention", "kv_cache", "linear", "moe", "norm", "philox", "rotary", "sampling"]
