"""The embedded default model for tests and benchmarks that run the engine in their own process."""

from __future__ import annotations

from pathlib import Path

from octavo.api_server.cli import default_cache_directory
from octavo.api_server.model_source import Location, ModelSource
from octavo.api_server.startup_log import StartupLog
from octavo.api_server.stop_signals import HelperRunner, SignalInbox
from octavo.protocol.config import CacheConfig, Dtype, EngineConfig, ModelConfig, SchedulerConfig, WeightsFormat

EMBEDDED_MODEL = "smollm2-135m"


def locate_model(name: str) -> Location:
    """What `octavo serve NAME` would serve; fetched and imported once, by the product's code."""
    with SignalInbox() as signals:
        return ModelSource(default_cache_directory(), HelperRunner(signals), StartupLog()).locate(name)


def locate_embedded_model() -> Location:
    """Its GGUF file, and the directory into which its metadata was imported."""
    return locate_model(EMBEDDED_MODEL)


def embedded_model_config(
    directory: Path,
    gguf: Path,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    max_model_len: int,
    dtype: Dtype | None = None,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path=str(directory),
            weights_path=str(gguf),
            weights_format=WeightsFormat.GGUF,
            served_model_names=("smollm2-135m",),
            max_model_len=max_model_len,
            vocab_size=49152,
            dtype=dtype,
        ),
        ipc_directory="/unused",
        cache=cache,
        scheduler=scheduler,
    )
