"""A rig in a thread of its own, for tests that are not coroutines, such as those that Hypothesis runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fake_engine import Script
from http_rig import Rig, running

from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AddRequest

TIMEOUT_S = 60


class ThreadedRig:
    """Attributes:
    rig: to be used in `do` only.
    script: what requests get from now on.
    """

    rig: Rig

    def __init__(self, config: EngineConfig) -> None:
        self.script: Callable[[AddRequest], Script] = lambda request: Script()
        self._loop = asyncio.new_event_loop()
        self._ready, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(config),))
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` in the rig's loop; return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    async def _run(self, config: EngineConfig) -> None:
        directory = Path(config.ipc_directory)
        async with running(directory, lambda request: self.script(request), config=config) as self.rig:
            self._ready.set()
            await self._ended.wait()
