"""Fixtures for all tests: the embedded default model, fetched once through the product's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded_model import locate_embedded_model

from octavo.api_server.model_source import Location


@pytest.fixture(scope="session")
def smollm2() -> Location:
    """The default model: its GGUF file, and the directory into which its metadata was imported."""
    return locate_embedded_model()


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Location) -> Path:
    return smollm2.weights_path


@pytest.fixture(scope="session")
def smollm2_directory(smollm2: Location) -> Path:
    return smollm2.path
