"""The embedded model behind the real processes, for tests of answers; started once for each module that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess

EMBEDDED_MODEL = "smollm2-135m"
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def embedded_server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    options = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "1GiB")
    with ServerProcess(EMBEDDED_MODEL, *options) as server:
        yield server


@pytest.fixture
async def embedded_client(embedded_server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of `embedded_server`."""
    url = f"{embedded_server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
        yield client
