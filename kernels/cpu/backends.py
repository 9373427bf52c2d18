"""Importing this module makes the backend "cpu" known to the registry."""

from octavo.kernels.cpu import activation, attention, kv_cache, norm, packed_linear

__all__ = ["activation", "attention", "kv_cache", "norm", "packed_linear"]
