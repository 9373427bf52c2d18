"""Small tokenizers of the kinds that models have, made on the spot, and model directories around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from octavo.api_server.tokenizer import Tokenizer
from octavo.api_server.tokenizer_files import TokenizerFiles

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Größe, naïve café, 日本語のテキスト, emoji 😀👩‍👩‍👧 and more words words words",
    "stop the stopping of stopped stops; \n\n new paragraph\n\tindented",
] * 4
SPECIAL_TOKENS = ["<s>", "</s>", "<|turn|>"]
SPACE_MARK = "\u2581"


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3, Qwen and SmolLM2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "über", "<終>"])  # markup that is not special; within and beyond the byte alphabet
    return tokenizer


def _byte_tokens() -> list[str]:
    return [f"<0x{value:02X}>" for value in range(256)]


def byte_fallback_bpe(strip_first_space: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece BPE with byte fallback, as of Llama 2 (strips the first space) and Gemma (does not)."""
    words = ["T", "h", "e", "l", "o", "w", "r", "d", ".", "\n", SPACE_MARK, "He", "llo", "Hello", SPACE_MARK + "Hello"]
    words += ["wo", "rld", SPACE_MARK + "wo", SPACE_MARK + "world", SPACE_MARK * 2, "é", "日"]
    vocab = {token: i for i, token in enumerate(["<unk>", *SPECIAL_TOKENS, *_byte_tokens(), *words])}
    merges = [("H", "e"), ("l", "o"), ("l", "lo"), ("He", "llo"), (SPACE_MARK, "Hello"), ("w", "o"), ("r", "l")]
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(["H", "lo", "rl"])}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    prepend: list[Any] = [normalizers.Prepend(SPACE_MARK)] if strip_first_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE_MARK)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if strip_first_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """SentencePiece Unigram with the Metaspace decoder, as of T5."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIAL_TOKENS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """WordPiece: a word's later parts begin with ##, and punctuation loses its space."""
    vocab = ["[UNK]", "hello", "world", "##ing", "stop", ",", ".", "a", "don", "'", "t", *SPECIAL_TOKENS]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def end_of_word_bpe() -> tokenizers.Tokenizer:
    """BPE whose words end in </w>: a token's last space depends on whether another one follows."""
    vocab = ["a", "b", "a</w>", "b</w>", "ab</w>", "hello</w>", "wor", "ld</w>", *SPECIAL_TOKENS]
    tokenizer = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback_bpe": byte_fallback_bpe,
    "byte_fallback_no_strip": lambda: byte_fallback_bpe(strip_first_space=False),
    "unigram": unigram,
    "word_piece": word_piece,
    "end_of_word_bpe": end_of_word_bpe,
}


def wrap(raw: tokenizers.Tokenizer, template: str | None = None) -> Tokenizer:
    """Return our tokenizer around `raw`."""
    return Tokenizer(raw, TokenizerFiles({"bos_token": "<s>", "eos_token": "</s>"}, template))


def write_directory(directory: Path, raw: tokenizers.Tokenizer, **tokenizer_config: Any) -> Path:
    """Write a model directory with tokenizer.json and tokenizer_config.json."""
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory
