"""Importing this module makes the backend "cpu" known to the registry."""

from octavo.kernels.cpu import activation, attention, candidates, kv_cache, norm, packed_linear, philox, sampling

__all__ = ["activation", "attention", "candidates", "kv_cache", "norm", "packed_linear", "philox", "sampling"]
