"""The model's tokenizer: text to token ids and back, and the chat template that belongs to it.

It is read from tokenizer.json by the tokenizers library, without transformers. Invariant: `encode` gives all tokens of
its text, whatever padding or truncation the file asks for. Which ids end an answer is not decided here but in the
ModelConfig. The text of special tokens inside a prompt becomes special tokens, as everywhere in this field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers

from octavo.api_server.chat_template import ChatTemplate
from octavo.api_server.token_bytes import UnsupportedDecoderError, make_token_bytes
from octavo.api_server.tokenizer_files import TokenizerFiles, read_tokenizer_files
from octavo.protocol.lifecycle import ExitCode, StartupError

INLINE_CHARS = 512  # below this, handing the text to a thread costs more than encoding it (about 100 µs)
INLINE_TOKENS = 128  # the same for decoding
NUM_THREADS = 2


class Tokenizer:
    """One tokenizer, shared by all requests.

    Attributes:
        vocab_size: one more than the largest token id.
        bos_token_id: id of the token that begins a text, if the model names one.
        special_token_ids: ids whose text is markup and not part of an answer.
        token_bytes: the bytes of single tokens, for Detokenizer.
        chat_template: how messages become a prompt; None when the model has no template.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        """Raise UnsupportedDecoderError for a decoder that cannot be streamed, StartupError for a broken template."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self.token_bytes = make_token_bytes(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        added_tokens = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added_tokens.items() if token.special)
        self.bos_token_id = tokenizer.token_to_id(files.special_tokens.get("bos_token", ""))
        template = files.chat_template
        self.chat_template = None if template is None else ChatTemplate(template, files.special_tokens)

    @classmethod
    def load(cls, model_path: str) -> Tokenizer:
        """Read a model directory; raises StartupError that names the file which is missing or broken."""
        directory = Path(model_path)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise StartupError(ExitCode.MODEL_NOT_FOUND, f"{path} is missing: give a directory that has a tokenizer")
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as problem:  # the library raises nothing more precise
            raise StartupError(ExitCode.MODEL_NOT_FOUND, f"{path} cannot be read: {problem}") from problem
        files = read_tokenizer_files(directory)
        try:
            return cls(raw, files)
        except UnsupportedDecoderError as problem:
            raise StartupError(ExitCode.UNSUPPORTED_MODEL, f"{path} is not supported: {problem}") from problem

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. A rendered chat template has its special tokens: pass False for it."""
        # A batch of one, because only the library's batches free the GIL: a long text must not stop the event loop.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    async def encode_off_loop(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode without holding up the event loop: a long text goes to a thread, where the library frees the GIL."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole token list. An output is made by Detokenizer instead."""
        # A batch of one for the same reason as in `encode`.
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    async def decode_off_loop(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode without holding up the event loop, as `encode_off_loop` does."""
        if len(token_ids) <= INLINE_TOKENS:
            return self.decode(token_ids, skip_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.decode, token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token after another one; empty when there is no such token."""
        new_bytes = self.token_bytes.get(token_id, token_id)
        return "" if new_bytes is None else new_bytes.decode(errors="replace")

    def close(self) -> None:
        """End the threads; texts that wait for one are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
