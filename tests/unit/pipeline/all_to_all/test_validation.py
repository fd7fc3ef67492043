"""What does not fit an exchange is refused before any side effect."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from exploration.exchange.single_rank import CASE, SOON, Bench, bench

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.hal.errors import ExchangeError
from equipoise.pipeline.all_to_all.formats import ExchangeFormat, RowFormat
from equipoise.pipeline.all_to_all.transport import ActiveRanksTransport


def batch_with(**other: Any) -> Callable[[Bench], object]:
    return lambda at: at.exchange.dispatch(replace(at.script.batch(0, 0), **other), at.stream())


SHAPES: dict[str, tuple[Callable[[Bench], object], str]] = {
    "ids of 64 bits": (batch_with(slots=torch.zeros(2, 2, dtype=torch.int64)), "slots: expected"),
    "another top k": (batch_with(slots=torch.zeros(2, 3, dtype=torch.int32)), "slots: expected"),
    "too many tokens": (batch_with(slots=torch.zeros(3, 2, dtype=torch.int32)), "2 at most, got 3"),
    "a payload too few": (batch_with(payloads=()), "payloads: expected 2, got 0"),
    "rows of another length": (
        batch_with(payloads=(torch.zeros(2, 5, dtype=torch.bfloat16), torch.zeros(2))),
        "payload 0: expected torch.bfloat16",
    ),
    "a generation on the host": (batch_with(generation=torch.tensor(3)), "generation: expected"),
    "loads of other experts": (batch_with(loads=torch.zeros(9, dtype=torch.int32)), "loads: exp"),
}


@pytest.mark.parametrize(("operation", "what"), SHAPES.values(), ids=SHAPES.keys())
def test_dispatch_refuses_wrong_batch_before_any_launch(
    operation: Callable[[Bench], object], what: str
) -> None:
    at = bench()
    before = at.launched()
    with pytest.raises(ExchangeError, match=what):
        operation(at)
    assert at.launched() == before
    at.dispatch(0)
    at.dispatch(1)


def test_combine_refuses_results_of_wrong_length() -> None:
    at = bench()
    at.dispatch(0)
    at.sent[0].wait(at.stream())
    with pytest.raises(ExchangeError, match="results: expected"):
        at.sent[0].combine(torch.zeros(1, 4), at.stream())
    at.combine(0)


@pytest.mark.parametrize("name", ["ranks", "slots_per_rank", "max_tokens", "top_k", "capacity"])
def test_exchange_format_refuses_zero_sizes(name: str) -> None:
    other: dict[str, Any] = {name: 0}
    with pytest.raises(ExchangeError, match=f"{name}: expected a positive number, got 0"):
        replace(CASE.form(), **other)


def test_row_format_refuses_16_byte_elements() -> None:
    with pytest.raises(ExchangeError, match="elements of 16 bytes"):
        RowFormat((1,), torch.complex128)


def test_active_ranks_must_be_of_the_group_and_include_this_rank() -> None:
    world = VirtualBackend().world(2, b"")
    group, accelerator = world.fabric(0).open("experts"), world.accelerator(0)
    for active in ([1], [0, 2], [-1, 0]):
        with pytest.raises(ExchangeError, match="active ranks"):
            ActiveRanksTransport(group, accelerator, SOON, active)
    assert ActiveRanksTransport(group, accelerator, SOON, [0]).active == (True, False)


def test_exchange_format_ample_has_no_overflow() -> None:
    row = RowFormat((4,), torch.float16)
    form = ExchangeFormat.without_overflow(
        3, 2, 8, max_tokens=5, top_k=4, payloads=[row], result=row
    )
    assert (form.capacity, form.result_capacity, form.max_entries) == (5, 20, 60)
    assert (form.num_slots, form.invalid_slot, row.nbytes) == (6, 2, 8)
