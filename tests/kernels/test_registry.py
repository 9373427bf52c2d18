import pytest

from octavo.kernels import registry
from octavo.kernels.registry import Op, backend, op, select


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Op[[int], int]:
    """An op in an otherwise empty registry, with a backend whose answers can be told apart."""
    monkeypatch.setattr(registry, "_OPS", {})

    @op
    def double(number: int) -> int:
        """Twice."""
        return 2 * number

    @backend("fast", double)
    def double_fast(number: int) -> int:
        return 2 * number + 1000

    return double


def test_an_op_is_its_reference_until_a_backend_is_selected(double: Op[[int], int]) -> None:
    assert double(3) == 6
    assert double.__doc__ == "Twice."


def test_select_takes_the_first_backend_that_implements_the_op(double: Op[[int], int]) -> None:
    assert select("missing", "fast") == {"double": "fast"}
    assert double(3) == 1006


def test_an_op_without_the_backend_stays_the_reference(double: Op[[int], int]) -> None:
    select("fast")
    assert select("missing") == {"double": "torch"}
    assert double(3) == 6


def test_a_test_can_force_a_backend_for_one_op(double: Op[[int], int]) -> None:
    assert double.select(["fast"]) == "fast"
    assert double(number=3) == 1006


def test_every_op_of_the_product_is_registered() -> None:
    from octavo.kernels.ops import (
        activation,
        attention,
        candidates,
        linear,
        logits_edits,
        moe,
        norm,
        packed_linear,
        philox,
        rotary,
        rotary_kv,
        sampling,
        token_logprobs,
    )

    modules = (
        *(activation, attention, candidates, linear, logits_edits, moe, norm),
        *(packed_linear, philox, rotary, rotary_kv, sampling, token_logprobs),
    )
    declared = {name for module in modules for name, value in vars(module).items() if isinstance(value, Op)}
    assert declared == set(select())
