"""Loading a tokenizer directory, and the two directions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
import tokenizers
from tokenizers import decoders

from octavo.api_server.tokenizer import INLINE_CHARS, Tokenizer
from octavo.protocol.lifecycle import ExitCode, StartupError

LONG_TEXT = "Hello world, " * INLINE_CHARS


def load(directory: Path, **tokenizer_config: object) -> Tokenizer:
    return Tokenizer.load(
        str(tiny_tokenizers.write_directory(directory, tiny_tokenizers.byte_level(), **tokenizer_config))
    )


def test_attributes(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bos_token={"content": "<s>", "special": True}, eos_token="</s>")
    assert tokenizer.vocab_size == 343
    assert tokenizer.bos_token_id == 0
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.chat_template is None
    assert load(tmp_path).bos_token_id is None


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("Hello 😀 world")
    assert tokenizer.decode(ids) == "Hello 😀 world"
    assert tokenizer.decode([0, *ids, 1]) == "Hello 😀 world"
    assert tokenizer.decode([0, *ids], skip_special_tokens=False) == "<s>Hello 😀 world"
    assert "".join(map(tokenizer.token_text, tokenizer.encode("Hello world<tool>"))) == "Hello world<tool>"
    assert tokenizer.token_text(10_000) == ""


def test_begin_of_text_is_added_only_when_asked_for(tmp_path: Path) -> None:
    raw = tiny_tokenizers.byte_level()
    raw.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer.load(str(tiny_tokenizers.write_directory(tmp_path, raw)))
    assert tokenizer.encode("Hello") == [0, *tokenizer.encode("Hello", add_special_tokens=False)]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    raw = tiny_tokenizers.byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=50)
    tokenizer = Tokenizer.load(str(tiny_tokenizers.write_directory(tmp_path, raw)))
    assert tokenizer.decode(tokenizer.encode(LONG_TEXT), skip_special_tokens=False) == LONG_TEXT
    assert len(tokenizer.encode("Hello")) < 50


@pytest.mark.parametrize("text", ["", "Hello", LONG_TEXT])
async def test_encoding_off_the_loop_is_the_same(tmp_path: Path, text: str) -> None:
    tokenizer = load(tmp_path)
    assert await tokenizer.encode_off_loop(text) == tokenizer.encode(text)
    tokenizer.close()
    with pytest.raises(RuntimeError):
        await tokenizer.encode_off_loop(LONG_TEXT)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is missing") as caught:
        Tokenizer.load(str(tmp_path))
    assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b""])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    load(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartupError, match=name.replace(".", r"\.")) as caught:
        Tokenizer.load(str(tmp_path))
    assert caught.value.exit_code is ExitCode.MODEL_NOT_FOUND


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    raw = tiny_tokenizers.byte_level()
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(StartupError, match="ByteLevel, Strip") as caught:
        Tokenizer.load(str(tiny_tokenizers.write_directory(tmp_path, raw)))
    assert caught.value.exit_code is ExitCode.UNSUPPORTED_MODEL


def template_text(directory: Path, **tokenizer_config: object) -> str | None:
    template = load(directory, **tokenizer_config).chat_template
    return None if template is None else template.render([])


def test_where_templates_hide(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "listed {{ bos_token }}"}]
    assert template_text(tmp_path) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "own json"}))
    assert template_text(tmp_path) == "own json"
    assert template_text(tmp_path, chat_template="config {{ eos_token }}", eos_token="</s>") == "config </s>"
    assert template_text(tmp_path, chat_template=named, bos_token="<s>") == "listed <s>"
    assert template_text(tmp_path, chat_template=named[:1]) == "rag"
    (tmp_path / "chat_template.jinja").write_text("own file {{ image_token }}")
    extra = {"image_token": "<image>"}
    assert template_text(tmp_path, chat_template="config", extra_special_tokens=extra) == "own file <image>"


def test_a_template_is_read_with_its_last_newline(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"a\r\n{{ 'b\n' }}\n")
    assert template_text(tmp_path) == "a\nb\n"


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, octavo.api_server.generation.output_processor; print({'torch', 'transformers'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "set()\n"


@pytest.mark.model
def test_smollm2_encodes_as_transformers_does(smollm2_directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, reference = Tokenizer.load(str(smollm2_directory)), AutoTokenizer.from_pretrained(smollm2_directory)
    assert tokenizer.vocab_size == len(reference) == 49152
    for text in (*tiny_tokenizers.CORPUS, "", "<|im_start|>user\nHi<|im_end|>\n", "\x00\ufffd\U0010ffff"):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)
