"""Allocators and reservation policies, worked out by hand; and that pieces never overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.client.shapes import Shape
from octavo.simulator.allocators import BuddyAllocator, FirstFitAllocator, next_power_of_two
from octavo.simulator.contiguous import num_reserved_slots
from octavo.simulator.run import run
from octavo.simulator.settings import Allocation, Batching, Reservation, Settings


def test_buddies_are_halved_and_joined():
    allocator = BuddyAllocator(16)
    assert [allocator.allocate(size) for size in (3, 1, 5, 4)] == [0, 4, 8, None], "4, 1, 8 slots; 1 + 2 are left"
    assert allocator.free(4) == 1
    assert allocator.allocate(4) == 4, "the single slot went back into its four"
    assert [allocator.free(address) for address in (0, 4, 8)] == [4, 4, 8]
    assert allocator.allocate(16) == 0


def test_a_region_that_is_no_power_of_two_is_used_to_its_end():
    allocator = BuddyAllocator(7)
    assert [allocator.allocate(size) for size in (1, 2, 4)] == [6, 4, 0]
    assert allocator.allocate(1) is None


def test_the_first_hole_that_fits():
    allocator = FirstFitAllocator(10)
    assert [allocator.allocate(size) for size in (3, 3, 4)] == [0, 3, 6]
    assert allocator.free(0) == 3
    assert allocator.allocate(4) is None
    assert allocator.free(3) == 3
    assert allocator.allocate(4) == 0, "two neighbours became one hole"
    assert allocator.allocate(2) == 4


@pytest.mark.parametrize("kind", [BuddyAllocator, FirstFitAllocator])
@given(num_slots=st.integers(1, 70), choices=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_pieces_never_overlap_and_nothing_is_lost(kind, num_slots, choices):
    allocator, pieces = kind(num_slots), {}
    for is_free, number in choices:
        if is_free and pieces:
            address = sorted(pieces)[number % len(pieces)]
            assert allocator.free(address) == len(pieces.pop(address))
        elif (address := allocator.allocate(number + 1)) is not None:
            size = number + 1 if kind is FirstFitAllocator else next_power_of_two(number + 1)
            piece = set(range(address, address + size))
            assert piece <= set(range(num_slots))
            assert not piece & set().union(*pieces.values())
            pieces[address] = piece
    for address in pieces:
        allocator.free(address)
    largest = num_slots if kind is FirstFitAllocator else 1 << (num_slots.bit_length() - 1)
    assert allocator.allocate(largest) == 0


@pytest.mark.parametrize(
    ("reservation", "num_slots"), [(Reservation.MAX, 100), (Reservation.POW2, 42), (Reservation.ORACLE, 35)]
)
def test_what_a_request_reserves(reservation, num_slots):
    """The paper's example: a true output length of 25 reserves 32."""
    assert num_reserved_slots(reservation, Shape(10, 25), 100) == num_slots


def test_a_power_of_two_ends_where_the_context_ends():
    assert num_reserved_slots(Reservation.POW2, Shape(80, 17), 100) == 100


def settings(**changes):
    return Settings(trace="fixed:10x3", num_requests=1, device="cpu", model="smollm2-135m", block_size=1, **changes)


@pytest.mark.parametrize(
    ("reservation", "reserved", "internal"),
    # Three steps with 10, 11 and 12 tokens; in the end 12 slots hold a token, the last token has none. Mean over steps.
    [(Reservation.ORACLE, 1, 1), (Reservation.POW2, 1, 2), (Reservation.MAX, 1, 20)],
)
def test_slots_by_use(reservation, reserved, internal):
    report, measured = run(
        settings(reservation=reservation, num_device_blocks=64, max_model_len=32, allocation=Allocation.BUDDY)
    )
    steps = measured.columns()
    assert steps["num_token_slots"].tolist() == [10, 11, 12]
    assert steps["num_reserved_slots"].tolist() == [reserved + 1, reserved, reserved - 1]
    assert steps["num_internal_slots"].tolist() == [internal] * 3
    size = next_power_of_two(10 + reserved + 1 + internal)
    assert steps["num_allocated_slots"].tolist() == [size] * 3
    assert report.kv_waste_mean_of_steps == pytest.approx(1 - 11 / size)
    memory = report.memory
    assert memory.token_states + memory.reserved + memory.internal + memory.external == pytest.approx(1)
    assert memory.internal == pytest.approx(internal / 64)


def trace_of(tmp_path, *lengths):
    rows = [f"2023-11-16 18:00:00.0,{num_prompt},{num_output}" for num_prompt, num_output in lengths]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return str(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    ("batching", "num_running", "num_token_slots"),
    # Two at a time. Continuous: the third takes the place of the first, after its 2 steps. Static: after all 5.
    [
        (Batching.CONTINUOUS, [2, 2, 2, 2, 2, 1], [4 + 4, 5 + 5, 6 + 4, 7 + 5, 8 + 6, 7]),
        (Batching.STATIC, [2, 2, 1, 1, 1, 1, 1, 1, 1], [4 + 4, 5 + 5, 6, 7, 8, 4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("limit", [{"num_device_blocks": 32}, {"num_device_blocks": 64, "max_num_seqs": 2}])
def test_a_static_batch_waits_for_its_longest(tmp_path, batching, num_running, num_token_slots, limit):
    report, measured = run(
        Settings(
            trace=trace_of(tmp_path, (4, 2), (4, 5), (4, 4)),
            device="cpu",
            model="smollm2-135m",
            block_size=1,
            max_model_len=16,
            reservation=Reservation.MAX,
            batching=batching,
            **limit,
        )
    )
    assert measured.columns()["num_running"].tolist() == num_running
    assert measured.columns()["num_token_slots"].tolist() == num_token_slots
    assert (report.num_requests, report.num_output_tokens) == (3, 11)


def test_a_request_that_no_piece_holds_is_an_error():
    with pytest.raises(ValueError, match="max-model-len"):
        run(settings(reservation=Reservation.MAX, num_device_blocks=24, max_model_len=20))
