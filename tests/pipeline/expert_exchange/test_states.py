"""Verbs out of turn are refused before any side effect; in turn they do what they say."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from exchanging import oracle
from exchanging.case import PLAIN, Case
from exchanging.script import Script
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks.cases.patterns import same

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.backends.virtual.world import World
from equipoise.hal.errors import ExchangeError, ExchangeMisuse
from equipoise.hal.stream import Role
from equipoise.pipeline.expert_exchange.fixed import Combined, Dispatched, FixedExchange
from equipoise.pipeline.expert_exchange.format import ExchangeFormat, RowFormat
from equipoise.pipeline.expert_exchange.torch_kernels import TorchKernels
from equipoise.pipeline.expert_exchange.wire import ActiveRanks, WholeGroup
from equipoise.pipeline.expert_exchange.words import Fitted, Overflowed

SOON = 2.0
CASE = replace(PLAIN, size=1, steps=[[[[[0, 1], [1, 2]]], [[[1, 1]]], [[]], [[[0, 2]]]]])


@dataclass
class Bench:
    """One rank that exchanges with itself, and moves at once.

    Attributes:
        world: where.
        script: makes its batches.
        sent: handles of dispatches, by batch.
        back: handles of combines, by batch.
    """

    world: World
    script: Script
    sent: dict[int, Dispatched] = field(default_factory=dict)
    back: dict[int, Combined] = field(default_factory=dict)

    @property
    def exchange(self) -> FixedExchange:
        return self.script.exchange

    def stream(self, number: int = 0) -> Any:
        return self.script.accelerator.stream(list(Role)[number])

    def dispatch(self, number: int, stream: int = 0) -> None:
        self.sent[number] = self.exchange.dispatch(
            self.script.batch(0, number), self.stream(stream)
        )

    def combine(self, number: int, stream: int = 0) -> None:
        """Experts compute on what the arrivals hold, whether or not anybody waited for them."""
        arrivals = self.exchange._berths[0]._kernels.rooms[0].arrivals
        if number in self.sent:
            arrivals = self.sent[number]._berth._room.arrivals
        rows = self.script.expert(arrivals)
        self.back[number] = self.sent[number].combine(rows, self.stream(stream))

    def launched(self) -> int:
        return sum(stream._launched for stream in self.world.device(0).streams)


def bench(case: Case = CASE) -> Bench:
    world = VirtualBackend().alone()
    accelerator, form = world.accelerator(0), case.form()
    wire = WholeGroup(world.fabric(0).open("experts"), accelerator, SOON)
    kernels = TorchKernels(form, wire, lambda n: world.empty(0, n).zero_())
    exchange = FixedExchange(form, kernels, accelerator)
    return Bench(world, Script(case, 0, exchange, accelerator, lambda n: world.empty(0, n)))


def refused(at: Bench, verb: Callable[[], object], what: str) -> None:
    """Out of turn, and nothing was launched."""
    before = at.launched()
    with pytest.raises(ExchangeMisuse, match=what):
        verb()
    assert at.launched() == before


def test_a_third_batch_in_flight_is_refused_and_the_two_go_on() -> None:
    at = bench()
    at.dispatch(0)
    at.dispatch(1)
    refused(at, lambda: at.exchange.dispatch(at.script.batch(0, 2), at.stream()), "all 2 rooms")
    for number in (0, 1):
        at.sent[number].wait(at.stream())
        at.combine(number)
        assert same(at.back[number].wait(at.stream()).clone(), oracle.dense(CASE, 0, number, 0))


def test_a_batch_is_combined_only_when_its_rows_were_waited_for_and_once() -> None:
    at = bench()
    at.dispatch(0)
    refused(at, lambda: at.combine(0), "sending")
    at.sent[0].wait(at.stream())
    at.combine(0)
    refused(at, lambda: at.combine(0), "returning")


def test_a_batch_is_released_only_when_its_results_were_waited_for_and_once() -> None:
    at = bench()
    at.dispatch(0)
    at.sent[0].wait(at.stream())
    at.combine(0)
    refused(at, lambda: at.back[0].release(at.stream()), "returning")
    at.back[0].wait(at.stream())
    at.back[0].release(at.stream())
    refused(at, lambda: at.back[0].release(at.stream()), "batch 1 is over")


def test_handles_of_a_batch_that_was_released_are_over_also_when_its_room_is_taken_again() -> None:
    at = bench()
    at.dispatch(0)
    at.sent[0].wait(at.stream())
    at.combine(0)
    at.back[0].wait(at.stream())
    at.back[0].release(at.stream())
    for number in (1, 2):
        at.dispatch(number)
        refused(at, lambda: at.sent[0].wait(at.stream()), "batch 1 is over")
        refused(at, lambda: at.back[0].wait(at.stream()), "batch 1 is over")


def test_the_words_are_read_only_when_every_dispatch_was_waited_for() -> None:
    at = bench()
    at.dispatch(0)
    refused(at, lambda: at.exchange.read(at.stream()), "not been waited for")
    at.sent[0].wait(at.stream())
    assert at.exchange.read(at.stream()).result(SOON) == Fitted(0)


def test_a_reading_that_another_has_overwritten_is_over() -> None:
    at = bench()
    early, late = at.exchange.read(at.stream()), at.exchange.read(at.stream())
    refused(at, lambda: early.result(SOON), "reading 1 was overwritten by reading 2")
    assert late.result(SOON) == Fitted(0)


def test_rows_and_results_may_be_waited_for_any_number_of_times_on_any_stream() -> None:
    at = bench()
    at.dispatch(3)
    first = at.sent[3].wait(at.stream(0))
    assert [at.sent[3].wait(at.stream(n)) for n in (0, 1, 2)] == [first] * 3
    at.combine(3)
    expected = oracle.dense(CASE, 0, 3, 0)
    for number in (0, 1, 1, 2):
        assert same(at.back[3].wait(at.stream(number)).clone(), expected)


@pytest.mark.parametrize("verbs", range(4))
def test_abandoned_batches_give_their_rooms_back_and_their_handles_are_over(verbs: int) -> None:
    at = bench()
    at.dispatch(0)
    for verb in (
        lambda: at.sent[0].wait(at.stream()),
        lambda: at.combine(0),
        lambda: at.back[0].wait(at.stream()),
    )[:verbs]:
        verb()
    at.dispatch(1)
    at.exchange.abandon(at.stream(), SOON)
    refused(at, lambda: at.sent[0].wait(at.stream()), "batch 1 is over")
    for number in (2, 3):
        at.dispatch(number)
        at.sent[number].wait(at.stream())
        at.combine(number)
        assert same(at.back[number].wait(at.stream()).clone(), oracle.dense(CASE, 0, number, 0))


def test_the_words_of_a_step_that_was_abandoned_are_forgotten() -> None:
    at = bench(replace(CASE, capacity=1, result_capacity=4))
    for number, verdict in ((0, Overflowed(1, 0)), (1, Fitted(0))):
        at.dispatch(number)
        at.sent[number].wait(at.stream())
        at.combine(number)
        at.back[number].wait(at.stream())
        assert at.exchange.read(at.stream()).result(SOON) == verdict
        at.back[number].release(at.stream())
    at.dispatch(0, 1)
    at.sent[0].wait(at.stream(2))
    at.exchange.abandon(at.stream(3), SOON)
    at.dispatch(1)
    at.sent[1].wait(at.stream())
    assert at.exchange.read(at.stream()).result(SOON) == Fitted(0)


def test_the_stream_computes_while_a_batch_travels_and_takes_the_next() -> None:
    world = VirtualBackend().world(2, b"")
    case = replace(CASE, size=2, steps=[[[[[0, 3]], []], [[[2, 1]], []]]])
    group, accelerator = world.fabric(0).open("experts"), world.accelerator(0)
    world.fabric(1).open("experts")  # the peer does not come
    kernels = TorchKernels(
        case.form(), WholeGroup(group, accelerator, SOON), lambda n: world.empty(0, n).zero_()
    )
    exchange = FixedExchange(case.form(), kernels, accelerator)
    script = Script(case, 0, exchange, accelerator, lambda n: world.empty(0, n))
    stream, ran = accelerator.stream(Role.COMPUTE), list[str]()
    first = exchange.dispatch(script.batch(0, 0), stream)
    stream.launch(lambda: ran.append("beside the first"))
    exchange.dispatch(script.batch(0, 1), stream)
    stream.launch(lambda: ran.append("beside both"))
    first.wait(stream)
    stream.launch(lambda: ran.append("behind the first"))
    world.until(lambda: False, SOON)
    assert ran == ["beside the first", "beside both"]


STATES = {"wait": "SAC", "combine": "A", "results": "CR", "release": "R"}
"""In which state each verb is in turn: sending, arrived, combining, returned."""


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dispatch", *STATES, "read"]), st.integers(0, 3), st.integers(0, 3)
        ),
        max_size=30,
    )
)
def test_any_verbs_in_any_order_are_done_in_turn_and_refused_out_of_turn(
    verbs: list[tuple[str, int, int]],
) -> None:
    at = bench()
    state: dict[int, str] = {}
    for verb, number, stream in verbs:
        busy = "".join(state.values())
        if verb == "dispatch" and number not in state:
            _done(at, len(busy) < 2, partial(at.dispatch, number, stream))
            if len(busy) < 2:
                state[number] = "S"
        elif verb == "read":
            _done(at, "S" not in busy, partial(at.exchange.read, at.stream(stream)))
        elif verb in STATES and _reachable(at, verb, number):
            in_turn = number in state and state[number] in STATES[verb] + "R" * (verb == "wait")
            _done(at, in_turn, partial(_do, at, verb, number, stream))
            if in_turn:
                _move(state, verb, number)


def _reachable(at: Bench, verb: str, number: int) -> bool:
    return number in (at.sent if verb in ("wait", "combine") else at.back)


def _done(at: Bench, in_turn: bool, verb: Callable[[], object]) -> None:
    if in_turn:
        verb()
    else:
        refused(at, verb, ".")


def _do(at: Bench, verb: str, number: int, stream: int) -> None:
    match verb:
        case "wait":
            at.sent[number].wait(at.stream(stream))
        case "combine":
            at.combine(number, stream)
        case "results":
            found = at.back[number].wait(at.stream(stream))
            assert same(found.clone(), oracle.dense(CASE, 0, number, 0))
        case _:
            at.back[number].release(at.stream(stream))


def _move(state: dict[int, str], verb: str, number: int) -> None:
    if verb == "release":
        del state[number]
    elif verb == "wait":
        state[number] = "A" if state[number] == "S" else state[number]
    else:
        state[number] = {"combine": "C", "results": "R"}[verb]


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


@pytest.mark.parametrize(("verb", "what"), SHAPES.values(), ids=SHAPES.keys())
def test_what_does_not_fit_is_refused_before_any_side_effect(
    verb: Callable[[Bench], object], what: str
) -> None:
    at = bench()
    before = at.launched()
    with pytest.raises(ExchangeError, match=what):
        verb(at)
    assert at.launched() == before
    at.dispatch(0)
    at.dispatch(1)


def test_results_of_another_number_of_entries_are_refused() -> None:
    at = bench()
    at.dispatch(0)
    at.sent[0].wait(at.stream())
    with pytest.raises(ExchangeError, match="results: expected"):
        at.sent[0].combine(torch.zeros(1, 4), at.stream())
    at.combine(0)


@pytest.mark.parametrize("name", ["ranks", "slots_per_rank", "max_tokens", "top_k", "capacity"])
def test_a_format_without_room_for_anything_is_refused(name: str) -> None:
    other: dict[str, Any] = {name: 0}
    with pytest.raises(ExchangeError, match=f"{name}: expected a positive number, got 0"):
        replace(CASE.form(), **other)


def test_elements_of_sixteen_bytes_are_refused() -> None:
    with pytest.raises(ExchangeError, match="elements of 16 bytes"):
        RowFormat((1,), torch.complex128)


def test_active_ranks_are_of_the_group_and_this_one_is_among_them() -> None:
    world = VirtualBackend().world(2, b"")
    group, accelerator = world.fabric(0).open("experts"), world.accelerator(0)
    for active in ([1], [0, 2], [-1, 0]):
        with pytest.raises(ExchangeError, match="active ranks"):
            ActiveRanks(group, accelerator, SOON, active)
    assert ActiveRanks(group, accelerator, SOON, [0]).active == (True, False)


def test_what_cannot_overflow_is_the_default() -> None:
    row = RowFormat((4,), torch.float16)
    form = ExchangeFormat.ample(3, 2, 8, max_tokens=5, top_k=4, payloads=[row], result=row)
    assert (form.capacity, form.result_capacity, form.entries) == (5, 20, 60)
    assert (form.slots, form.invalid, row.nbytes) == (6, 2, 8)
