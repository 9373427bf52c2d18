"""Builds tokenizer.json from the vocabulary that a GGUF file carries.

Two kinds cover the models that we serve: byte-level BPE (`gpt2` in the file) and SentencePiece BPE (`llama`). How text
is cut before the merges apply is only named in the file (`tokenizer.ggml.pre`), so the rules are written down here; a
name that is not is refused, because a wrong cut silently makes answers worse. Rejected: the conversion in
transformers, which takes seconds and does not know the rule of the SmolLM models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.protocol.lifecycle import ExitCode, StartupError

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

GPT2_PRE = ("gpt-2", "default", "mpt", "olmo", "jais", "trillion", "granite-docling")
DIGITS_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# The patterns of the models' own tokenizer.json files.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_SPLIT),
    "tekken": TEKKEN_SPLIT,
}
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary is taken without merges
BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")
SPACE = "\u2581"

Metadata = dict[str, Any]


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer that `metadata` describes; raises StartupError with UNSUPPORTED_MODEL."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise _unsupported(f"its tokenizer is of the kind {kind!r}; only 'gpt2' and 'llama' are known")
    _add_special_tokens(tokenizer, metadata)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if adds_bos(metadata) and bos_id is not None:
        bos = token_text(metadata, bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def token_text(metadata: Metadata, token_id: int) -> str:
    """Return the text of `token_id`; raises StartupError when the vocabulary has no such id."""
    tokens = metadata["tokenizer.ggml.tokens"]
    if not 0 <= token_id < len(tokens):
        raise StartupError(ExitCode.BAD_WEIGHTS, f"the vocabulary has {len(tokens)} tokens, but no token {token_id}")
    text: str = tokens[token_id]
    return text


def adds_bos(metadata: Metadata) -> bool:
    """Return whether a text starts with the BOS token; files that do not say so follow their kind."""
    by_kind = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in BEGINS_WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_kind))


def _byte_level(metadata: Metadata) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", GPT2_PRE[0])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in GPT2_PRE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in DIGITS_PRE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise _unsupported(f"its rule for cutting text, {pre!r}, is not known")


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            list(_merges_from_scores(metadata, vocabulary)),
            unk_token=token_text(metadata, unknown_id),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    begins_with_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Prepend(SPACE)] if begins_with_space else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(metadata: Metadata, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the merges that SentencePiece implies: any two tokens that make a third, the best score first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or not len(tokens) == len(types) == len(scores):
        raise StartupError(ExitCode.BAD_WEIGHTS, "its vocabulary has no score or no type for some tokens")
    mergeable = {token for token, token_type in zip(tokens, types, strict=True) if token_type == NORMAL}
    found = [
        (-score, -cut, -(len(token) - cut), vocabulary[token[:cut]], token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        if token in mergeable
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    found.sort()
    yield from ((left, right) for *_, left, right in found)


def _add_special_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    typed = zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False)
    special, plain = [], []
    for token, token_type in typed:
        if token_type in (UNKNOWN, CONTROL):
            special.append(AddedToken(token, normalized=False, special=True))
        elif token_type == USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _unsupported(reason: str) -> StartupError:
    return StartupError(ExitCode.UNSUPPORTED_MODEL, f"{reason}; serve the model's safetensors directory instead")
