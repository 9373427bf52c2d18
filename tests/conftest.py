"""Fixtures for all tests: the embedded default model, fetched once through the product's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.api_server.cli import default_cache_directory
from octavo.api_server.model_source import Location, ModelSource
from octavo.api_server.startup_log import StartupLog
from octavo.api_server.stop_signals import HelperRunner, SignalInbox


@pytest.fixture(scope="session")
def smollm2() -> Location:
    """The default model: its GGUF file, and the directory into which its metadata was imported."""
    with SignalInbox() as signals:
        return ModelSource(default_cache_directory(), HelperRunner(signals), StartupLog()).locate("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Location) -> Path:
    return smollm2.weights_path


@pytest.fixture(scope="session")
def smollm2_directory(smollm2: Location) -> Path:
    return smollm2.path
