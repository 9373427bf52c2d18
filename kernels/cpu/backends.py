"""Importing this module makes the backend "cpu" known to the registry."""

from octavo.kernels.cpu import activation, norm

__all__ = ["activation", "norm"]
