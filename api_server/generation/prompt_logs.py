"""Logprobs of the prompts of a run: collected from the first choice of each, complete before any choice is answered."""

from __future__ import annotations

import asyncio
import logging

from octavo.api_server.engine_client import Generation, Update
from octavo.api_server.errors import internal_error
from octavo.api_server.generation.job import Job, TokenEntry
from octavo.api_server.generation.token_log import prompt_entries
from octavo.api_server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class PromptLogs:
    """The entries of each prompt, and the updates of choices whose prompt is not complete.

    Attributes:
        entries: prompt index -> an entry for each token.
    """

    def __init__(self, job: Job, generation: Generation, tokenizer: Tokenizer) -> None:
        self.entries: dict[int, list[TokenEntry]] = {}
        self._job = job
        self._generation = generation
        self._tokenizer = tokenizer
        self._held: list[Update] = []

    async def release(self, updates: list[Update]) -> list[Update]:
        """Take `updates`; return, in order, all whose prompt has its entries now. Entries are made in a thread."""
        waiting = self._held + updates
        for prompt_index in dict.fromkeys(map(self._prompt_of, waiting)):
            if prompt_index not in self.entries and self._is_complete(prompt_index, waiting):
                self.entries[prompt_index] = await self._make_entries(prompt_index)
        self._held = [update for update in waiting if self._prompt_of(update) not in self.entries]
        return [update for update in waiting if self._prompt_of(update) in self.entries]

    def _prompt_of(self, update: Update) -> int:
        return update.index // self._job.num_requests_per_prompt

    def _is_complete(self, prompt_index: int, waiting: list[Update]) -> bool:
        first_choice = prompt_index * self._job.num_requests_per_prompt
        num_missing = (
            len(self._job.prompt_token_ids(prompt_index))
            - 1
            - self._generation.live_requests[first_choice].num_prompt_rows
        )
        if num_missing and any(update.index == first_choice for update in waiting):
            logger.error("a request has output, and lacks logprobs of %d prompt tokens", num_missing)
            raise internal_error()
        return num_missing == 0

    async def _make_entries(self, prompt_index: int) -> list[TokenEntry]:
        live = self._generation.live_requests[prompt_index * self._job.num_requests_per_prompt]
        return await asyncio.to_thread(
            prompt_entries,
            self._tokenizer,
            self._job.prompt_token_ids(prompt_index),
            live.prompt_logprobs,
            self._job.rendering.skip_special_tokens,
        )
