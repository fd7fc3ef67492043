"""What does not fit the exchange of variable sizes is refused by name before anything is sent."""

from typing import Any

import pytest
import torch

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.hal.errors import ExchangeError, GenerationMismatch
from equipoise.hal.routing import DispatchCounts
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.variable_size import VariableSizeExchange, _check_slots

PER_RANK = 6
IDS = torch.tensor([[0, 5], [3, 6]], dtype=torch.int32)


def exchange(**changes: Any) -> VariableSizeExchange:
    world = VirtualBackend().alone()
    arguments: dict[str, Any] = {
        "communicator": world.fabric(0).open("experts"),
        "slots_per_rank": PER_RANK,
        "stream": world.accelerator(0).stream(Role.COMPUTE),
        "deadline": 5.0,
    }
    return VariableSizeExchange(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots_per_rank": 0}, "slots_per_rank must be at least 1, got 0"),
        ({"slots_per_rank": -1}, "slots_per_rank must be at least 1, got -1"),
        ({"slots_per_rank": 2.5}, "slots_per_rank must be a whole number, got 2.5"),
        ({"deadline": float("nan")}, "deadline must be seconds above 0, got nan"),
        ({"communicator": None}, "communicator must be what `fabric.open` returns, got None"),
    ],
)
def test_exchange_refuses_bad_arguments_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExchangeError) as error:
        exchange(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (IDS - 1, "slots: expected 0 to 5, or 6 and above for padding, got -1"),
        (IDS[0], "slots: expected int32 [tokens, top_k], got torch.int32 [2]"),
        (IDS.float(), "slots: expected int32 [tokens, top_k], got torch.float32 [2, 2]"),
    ],
)
def test_prepare_refuses_unknown_slots(slots: torch.Tensor, message: str) -> None:
    with pytest.raises(ExchangeError) as error:
        exchange().prepare(slots, 0)
    assert str(error.value) == message


ROWS = torch.bincount(IDS.flatten().long(), minlength=PER_RANK + 1)[None, :PER_RANK]
OTHER = ROWS.flip(1)


@pytest.mark.parametrize(
    ("rows", "generations", "error", "message"),
    [
        (ROWS.int(), (3,), ExchangeError, "counts: expected int64 [1, 6], got torch.int32 [1, 6]"),
        (ROWS[:, 1:], (3,), ExchangeError, "counts: expected int64 [1, 6], got torch.int64 [1, 5]"),
        (ROWS, (3, 3), ExchangeError, "counts: expected generations of 1 ranks, got 2"),
        (ROWS, (4,), GenerationMismatch, "rank 0 dispatched with generation 4, rank 0 has 3"),
        (
            OTHER,
            (3,),
            ExchangeError,
            "counts: the slots of rank 0 are not those that its router chose: 3 rows by the counts "
            "and 3 by the slots, which have to be passed on unchanged",
        ),
    ],
)
def test_prepare_refuses_counts_that_do_not_fit_its_slots(
    rows: torch.Tensor, generations: tuple[int, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        exchange().prepare(IDS, 3, DispatchCounts(rows, generations))
    assert str(raised.value) == message


def test_slot_values_are_not_read_on_a_device() -> None:
    slots = (IDS + 1).to("meta")  # raises where a value is read
    _check_slots(slots, PER_RANK)
    with pytest.raises(ExchangeError, match="slots: expected int32"):
        _check_slots(slots[0], PER_RANK)


def test_rows_that_are_not_those_of_the_route_are_refused() -> None:
    at = exchange()
    route = at.prepare(IDS, 0)
    (received,) = at.dispatch(route, [torch.arange(2.0)[:, None]])
    for rows in (1, 3):
        with pytest.raises(ExchangeError, match=f"payload 0: expected 2 rows, got \\[{rows}, 1\\]"):
            at.dispatch(route, [torch.zeros(rows, 1)])
    with pytest.raises(ExchangeError, match="payloads must be a sequence of tensors"):
        at.dispatch(route, torch.zeros(2, 1))  # type: ignore[arg-type]
    with pytest.raises(ExchangeError, match=r"rows: expected 3 rows, got \[2, 1\]"):
        at.combine(route, received[:2])
    assert at.combine(route, received)[:, :, 0].tolist() == [[0, 0], [1, 0]]
