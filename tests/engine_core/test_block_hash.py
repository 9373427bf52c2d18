"""The names of blocks: another one for everything that changes a block's KV, and the same in every process."""

from hashlib import blake2b
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine_core.block_hash import DIGEST_BYTES, extend_hashes, hash_root

ROOT = hash_root("model", "adapter", "salt")
token_ids = st.integers(0, 2**32 - 1)


def chain(root, tokens, block_size):
    hashes = []
    extend_hashes(hashes, root, tokens, block_size)
    return hashes


def plain_root(model, adapter, salt):
    """The encoding that the docstring describes, written down once more."""
    data = b""
    for tag, value in zip("MAS", (model, adapter, salt), strict=True):
        text = value.encode("utf-8", "surrogatepass")
        data += tag.encode() + len(text).to_bytes(8, "little") + text
    return blake2b(data, digest_size=16, person=b"octavo.root").digest()


def plain_chain(root, tokens, block_size):
    hashes, parent = [], root
    for index in range(len(tokens) // block_size):
        block = tokens[index * block_size : (index + 1) * block_size]
        data = parent + b"".join(token_id.to_bytes(4, "little") for token_id in block)
        parent = blake2b(data, digest_size=16, person=b"octavo.block").digest()
        hashes.append(parent)
    return hashes


@given(st.text(), st.text(), st.text(), st.lists(token_ids, max_size=40), st.integers(1, 9))
def test_names_are_those_of_a_plain_implementation(model, adapter, salt, tokens, block_size):
    root = hash_root(model, adapter, salt)
    assert root == plain_root(model, adapter, salt)
    assert chain(root, tokens, block_size) == plain_chain(root, tokens, block_size)


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4)), unique=True, max_size=30))
def test_each_field_of_the_root_counts(fields):
    roots = {hash_root(*values) for values in fields}
    assert len(roots) == len(fields)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "", ""), ("a", "b", "")),
        (("a", "b", ""), ("a", "", "b")),
        (("", "", "ab"), ("ab", "", "")),
        (("A", "", ""), ("", "A", "")),
        (("a\0", "b", ""), ("a", "\0b", "")),
        (("a" + "A" + "\x01" + "\0" * 7 + "b", "", ""), ("a", "b", "")),
        (("\ud800", "", ""), ("?", "", "")),
    ],
)
def test_no_field_can_look_like_two(one, other):
    assert hash_root(*one) != hash_root(*other)


@given(st.lists(st.lists(token_ids, min_size=3, max_size=3), unique_by=tuple, min_size=2, max_size=20))
def test_different_tokens_have_different_names(blocks):
    assert len({chain(ROOT, block, 3)[0] for block in blocks}) == len(blocks)


def test_the_beginning_is_part_of_every_name():
    """The same tokens after another block, or under another root, are another content."""
    first, second, changed = [1, 2], [3, 4], [1, 5]
    assert chain(ROOT, first + second, 2)[1] != chain(ROOT, changed + second, 2)[1]
    assert chain(ROOT, first + second, 2)[1] != chain(ROOT, second, 2)[0]
    assert chain(ROOT, second + first, 2)[1] != chain(ROOT, first, 2)[0]
    for root in (
        hash_root("model", "adapter", "other"),
        hash_root("model", "", "salt"),
        hash_root("", "adapter", "salt"),
    ):
        assert not set(chain(ROOT, first + second, 2)) & set(chain(root, first + second, 2))


def test_blocks_of_another_size_have_other_names():
    tokens = [7] * 24
    names = [set(chain(ROOT, tokens, block_size)) for block_size in (1, 2, 3, 4, 6, 8)]
    assert all(not one & other for one, other in combinations(names, 2))


def test_a_partial_block_has_no_name():
    assert chain(ROOT, [], 4) == []
    assert chain(ROOT, [1, 2, 3], 4) == []
    assert len(chain(ROOT, range(7), 4)) == 1
    assert len(chain(ROOT, range(8), 4)) == 2


@given(st.lists(token_ids, max_size=40), st.integers(1, 5), st.data())
def test_names_may_be_given_bit_by_bit(tokens, block_size, data):
    """A request's names grow with its output; it does not matter when they were worked out."""
    hashes = []
    while len(hashes) < len(tokens) // block_size:
        start = len(hashes) * block_size
        extend_hashes(hashes, ROOT, tokens[start : start + block_size - 1], block_size)
        known = data.draw(st.integers(start + block_size, len(tokens)))
        extend_hashes(hashes, ROOT, tokens[start:known], block_size)
    assert hashes == chain(ROOT, tokens, block_size)


def test_names_have_128_bits_and_token_ids_32():
    assert len(ROOT) == DIGEST_BYTES == 16
    (highest,) = chain(ROOT, [2**32 - 1], 1)
    assert len(highest) == DIGEST_BYTES
    for token_id in (2**32, -1):
        hashes = []
        with pytest.raises(OverflowError):
            extend_hashes(hashes, ROOT, [1, token_id], 1)
        assert hashes == []
