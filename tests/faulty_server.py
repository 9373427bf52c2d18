"""A server of streamed completions whose every fault is known, for tests of the load client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class FaultyServer:
    """Streams `max_tokens` words. The model's name says what goes wrong."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/{endpoint:completions|chat/completions}", self.generate)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if body["model"] == "refusing":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.stream(request, body)
        finally:
            self.in_flight -= 1

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault, num_tokens = body["model"], body["max_tokens"] - (body["model"] == "short")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        for index in range(num_tokens):
            await asyncio.sleep(0.001)
            if index == 2 and (fault == "failing" or (fault == "sometimes" and len(self.bodies) % 2)):
                await send({"error": {"message": "lost its weights" if fault == "failing" else "lost \x1b[2J"}})
                return response
            word = f"w{index}" if fault != "unsteady" or self.in_flight == 1 else "other"
            kind = "reasoning_content" if fault == "thinking" and index < 2 else "content"
            choice = {"delta": {kind: word}} if "messages" in body else {"text": word}
            is_last = index == num_tokens - 1 and fault != "unfinished"
            await send({"choices": [{**choice, "finish_reason": "length" if is_last else None}]})
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
        if fault != "uncounted":
            await send({"choices": [], "usage": usage})
        if fault != "broken":
            await response.write(b"data: [DONE]\n\n")
        return response

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[FaultyServer, str]]:
        """Yield itself and its URL."""
        async with TestServer(self.app()) as server:
            yield self, str(server.make_url("")).rstrip("/")
