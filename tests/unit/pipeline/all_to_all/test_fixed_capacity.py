"""Operations out of turn are refused before any side effect; in turn they do what they say."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from exploration.exchange import oracle
from exploration.exchange.rank_program import Script
from exploration.exchange.single_rank import CASE, SOON, Bench, bench
from helpers.rank_programs.tensor_patterns import same
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.backends.virtual.backend import VirtualBackend
from equipoise.hal.errors import ExchangeMisuse
from equipoise.hal.stream import Role
from equipoise.pipeline.all_to_all.fixed_capacity import FixedCapacityExchange
from equipoise.pipeline.all_to_all.status import StepFitted, StepOverflowed
from equipoise.pipeline.all_to_all.torch_kernels import TorchKernels
from equipoise.pipeline.all_to_all.transport import AllRanksTransport


def assert_refused(at: Bench, call: Callable[[], object], what: str) -> None:
    """Out of turn, and nothing was launched."""
    before = at.launched()
    with pytest.raises(ExchangeMisuse, match=what):
        call()
    assert at.launched() == before


def test_dispatch_refuses_third_batch_in_flight() -> None:
    at = bench()
    at.dispatch(0)
    at.dispatch(1)
    assert_refused(
        at, lambda: at.exchange.dispatch(at.script.batch(0, 2), at.stream()), "all 2 buffer sets"
    )
    for number in (0, 1):
        at.sent[number].wait(at.stream())
        at.combine(number)
        assert same(at.back[number].wait(at.stream()).clone(), oracle.dense(CASE, 0, number, 0))


def test_combine_needs_waited_rows_and_happens_once() -> None:
    at = bench()
    at.dispatch(0)
    assert_refused(at, lambda: at.combine(0), "dispatching")
    at.sent[0].wait(at.stream())
    at.combine(0)
    assert_refused(at, lambda: at.combine(0), "combining")


def test_release_needs_waited_results_and_happens_once() -> None:
    at = bench()
    at.dispatch(0)
    at.sent[0].wait(at.stream())
    at.combine(0)
    assert_refused(at, lambda: at.back[0].release(at.stream()), "combining")
    at.back[0].wait(at.stream())
    at.back[0].release(at.stream())
    assert_refused(at, lambda: at.back[0].release(at.stream()), "batch 1 is over")


def test_handles_of_released_batch_are_over_after_room_reuse() -> None:
    at = bench()
    at.dispatch(0)
    at.sent[0].wait(at.stream())
    at.combine(0)
    at.back[0].wait(at.stream())
    at.back[0].release(at.stream())
    for number in (1, 2):
        at.dispatch(number)
        assert_refused(at, lambda: at.sent[0].wait(at.stream()), "batch 1 is over")
        assert_refused(at, lambda: at.back[0].wait(at.stream()), "batch 1 is over")


def test_exchange_read_needs_every_dispatch_waited_for() -> None:
    at = bench()
    at.dispatch(0)
    assert_refused(at, lambda: at.exchange.read_status(at.stream()), "not been waited for")
    at.sent[0].wait(at.stream())
    assert at.exchange.read_status(at.stream()).result(SOON) == StepFitted(0)


def test_exchange_reading_overwritten_by_later_one_is_refused() -> None:
    at = bench()
    first, second = at.exchange.read_status(at.stream()), at.exchange.read_status(at.stream())
    assert_refused(at, lambda: first.result(SOON), "readback 1 was overwritten by readback 2")
    assert second.result(SOON) == StepFitted(0)


def test_batch_waits_may_repeat_on_any_stream() -> None:
    at = bench()
    at.dispatch(3)
    first = at.sent[3].wait(at.stream(0))
    assert [at.sent[3].wait(at.stream(n)) for n in (0, 1, 2)] == [first] * 3
    at.combine(3)
    expected = oracle.dense(CASE, 0, 3, 0)
    for number in (0, 1, 1, 2):
        assert same(at.back[3].wait(at.stream(number)).clone(), expected)


@pytest.mark.parametrize("operations", range(4))
def test_exchange_abandon_frees_buffers_and_ends_handles(operations: int) -> None:
    at = bench()
    at.dispatch(0)
    for call in (
        lambda: at.sent[0].wait(at.stream()),
        lambda: at.combine(0),
        lambda: at.back[0].wait(at.stream()),
    )[:operations]:
        call()
    at.dispatch(1)
    at.exchange.abort_step(at.stream(), SOON)
    assert_refused(at, lambda: at.sent[0].wait(at.stream()), "batch 1 is over")
    for number in (2, 3):
        at.dispatch(number)
        at.sent[number].wait(at.stream())
        at.combine(number)
        assert same(at.back[number].wait(at.stream()).clone(), oracle.dense(CASE, 0, number, 0))


def test_exchange_abandon_forgets_overflow_words() -> None:
    at = bench(replace(CASE, capacity=1, result_capacity=4))
    for number, verdict in ((0, StepOverflowed(1, 0)), (1, StepFitted(0))):
        at.dispatch(number)
        at.sent[number].wait(at.stream())
        at.combine(number)
        at.back[number].wait(at.stream())
        assert at.exchange.read_status(at.stream()).result(SOON) == verdict
        at.back[number].release(at.stream())
    at.dispatch(0, 1)
    at.sent[0].wait(at.stream(2))
    at.exchange.abort_step(at.stream(3), SOON)
    at.dispatch(1)
    at.sent[1].wait(at.stream())
    assert at.exchange.read_status(at.stream()).result(SOON) == StepFitted(0)


def test_stream_computes_while_dispatched_batches_travel() -> None:
    world = VirtualBackend().world(2, b"")
    case = replace(CASE, size=2, steps=[[[[[0, 3]], []], [[[2, 1]], []]]])
    group, accelerator = world.fabric(0).open("experts"), world.accelerator(0)
    world.fabric(1).open("experts")  # the peer does not come
    kernels = TorchKernels(
        case.form(),
        AllRanksTransport(group, accelerator, SOON),
        lambda n: world.empty(0, n).zero_(),
    )
    exchange = FixedCapacityExchange(case.form(), kernels, accelerator)
    script = Script(case, 0, exchange, accelerator, lambda n: world.empty(0, n))
    stream, log = accelerator.stream(Role.COMPUTE), list[str]()
    first = exchange.dispatch(script.batch(0, 0), stream)
    stream.launch(lambda: log.append("beside the first"))
    exchange.dispatch(script.batch(0, 1), stream)
    stream.launch(lambda: log.append("beside both"))
    first.wait(stream)
    stream.launch(lambda: log.append("behind the first"))
    world.until(lambda: False, SOON)
    assert log == ["beside the first", "beside both"]


def test_exchanges_of_different_batch_sizes_share_a_wire() -> None:
    world = VirtualBackend().alone()
    accelerator, stream = world.accelerator(0), world.accelerator(0).stream(Role.COMPUTE)
    transport = AllRanksTransport(world.fabric(0).open("experts"), accelerator, SOON)
    scripts = []
    for steps in ([[[[[0, 1]]]]], [[[[[1, 1], [0, 9], [0, 1]]]]]):
        case = replace(CASE, steps=steps)
        kernels = TorchKernels(case.form(), transport, lambda n: world.empty(0, n).zero_())
        exchange = FixedCapacityExchange(case.form(), kernels, accelerator)
        scripts.append(Script(case, 0, exchange, accelerator, lambda n: world.empty(0, n)))
    handles = [script.exchange.dispatch(script.batch(0, 0), stream) for script in scripts * 2]
    for script, one in zip(scripts * 2, handles, strict=True):
        combine_handle = one.combine(script.expert(one.wait(stream)), stream)
        assert same(combine_handle.wait(stream).clone(), oracle.dense(script.case, 0, 0, 0))


STATES = {"wait": "SAC", "combine": "A", "results": "CR", "release": "R"}
"""In which state each call is in turn: dispatching, dispatched, combining, combined."""


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dispatch", *STATES, "read"]), st.integers(0, 3), st.integers(0, 3)
        ),
        max_size=30,
    )
)
def test_exchange_operations_follow_state_model_in_any_order(
    operations: list[tuple[str, int, int]],
) -> None:
    at = bench()
    state: dict[int, str] = {}
    for call, number, stream in operations:
        phases = "".join(state.values())
        if call == "dispatch" and number not in state:
            _check_call(at, len(phases) < 2, partial(at.dispatch, number, stream))
            if len(phases) < 2:
                state[number] = "S"
        elif call == "read":
            _check_call(at, "S" not in phases, partial(at.exchange.read_status, at.stream(stream)))
        elif call in STATES and _reachable(at, call, number):
            is_allowed = number in state and state[number] in STATES[call] + "R" * (call == "wait")
            _check_call(at, is_allowed, partial(_do, at, call, number, stream))
            if is_allowed:
                _move(state, call, number)


def _reachable(at: Bench, call: str, number: int) -> bool:
    return number in (at.sent if call in ("wait", "combine") else at.back)


def _check_call(at: Bench, is_allowed: bool, call: Callable[[], object]) -> None:
    if is_allowed:
        call()
    else:
        assert_refused(at, call, ".")


def _do(at: Bench, call: str, number: int, stream: int) -> None:
    match call:
        case "wait":
            at.sent[number].wait(at.stream(stream))
        case "combine":
            at.combine(number, stream)
        case "results":
            results = at.back[number].wait(at.stream(stream))
            assert same(results.clone(), oracle.dense(CASE, 0, number, 0))
        case _:
            at.back[number].release(at.stream(stream))


def _move(state: dict[int, str], call: str, number: int) -> None:
    if call == "release":
        del state[number]
    elif call == "wait":
        state[number] = "A" if state[number] == "S" else state[number]
    else:
        state[number] = {"combine": "C", "results": "R"}[call]
