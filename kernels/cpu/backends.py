"""Importing this module makes the backend "cpu" known to the registry."""

from octavo.kernels.cpu import norm

__all__ = ["norm"]
