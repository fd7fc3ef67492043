"""Requests between vLLM's client and a policy: none is lost, none is sent twice, books end at 0."""

import asyncio
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.fakes.failing_policies import FailingPolicy
from helpers.fakes.fake_core_client import FakeRequest, Release, asked, deploy, turn
from helpers.fakes.late_binding_policy import LateBinding
from helpers.fakes.manual_clock import LoopTurns
from helpers.harnesses.request_routing_scenario import ACTS, ENGINES, LATER, SLOTS, Act, Play, run
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import STEP_TIMEOUT_SECONDS
from equipoise.balancer.requests.policy_settings import POLICIES
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.dp.scheduler import Delivery, RoutingMode


@pytest.fixture
def engine_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the engine's modules, and the reasons for which requests were ended by them."""
    reasons: list[str] = []

    class Reasons:
        def __class_getitem__(cls, name: str) -> str:
            reasons.append(name)
            return name.lower()

    def output(request_id: str, tokens: list[int], finish_reason: str) -> SimpleNamespace:
        return SimpleNamespace(request_id=request_id, tokens=tokens, finish_reason=finish_reason)

    engine: Any = ModuleType("vllm.v1.engine")
    engine.EngineCoreOutput, engine.EngineCoreOutputs = output, SimpleNamespace
    engine.FinishReason = Reasons
    client: Any = ModuleType("vllm.v1.engine.core_client")
    client.get_late_interaction_engine_index = lambda params, count: int(params[-1]) % count
    for module in (engine, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return reasons


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("name", list(POLICIES))
@given(actions=st.lists(ACTS, max_size=60))
def test_scheduler_never_loses_or_duplicates_requests(
    name: str, clients: int, actions: list[Act]
) -> None:
    async def work() -> None:
        play = Play(deploy(SLOTS, ENGINES, clients, policy=name, queue_timeout=LATER))
        for action in actions:
            await play.act(*action)
        await play.finish()
        play.look_at_policies()

    run(work())


@pytest.mark.parametrize("clients", [1, 2])
@given(actions=st.lists(ACTS, max_size=60), name=st.sampled_from(list(POLICIES)))
def test_scheduler_never_loses_or_duplicates_requests_of_older_client(
    clients: int, actions: list[Act], name: str
) -> None:
    async def work() -> None:
        routing = {"policy": name, "queue_timeout": LATER}
        play = Play(deploy(SLOTS, ENGINES, clients, release=Release.OLD, **routing))
        for action in actions:
            await play.act(*action)
        await play.finish()
        play.look_at_policies()

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fit", "brh", "jsq"])
@example(
    actions=[
        ("arrive", 1, None),
        ("arrive", 1, None),
        ("arrive", 27, None),
        ("part", 92, None),
        ("late", 1, None),
        ("arrive", 0, None),
        ("abort", 2, None),
    ]
)
@given(actions=st.lists(ACTS, max_size=60))
def test_scheduler_never_loses_overdue_requests(name: str, actions: list[Act]) -> None:
    async def work() -> None:
        play = Play(deploy(SLOTS, ENGINES, 2, policy=name, queue_timeout=5))
        for action in actions:
            await play.act(*action)
        await play.finish()
        play.look_at_policies()

    run(work())


class HeldRequest:
    """An engine filled by requests `busy`, and a request `late` that the scheduler holds."""

    def __init__(self, **routing: Any) -> None:
        options = {"policy": "fit", "queue_timeout": LATER, **routing}
        self.setup = deploy(1, 2, **options)
        self.client = self.setup.clients[0]
        self.clock = LoopTurns()
        self.client.scheduler.dispatcher.clock = self.clock
        self.late = asked("late", length=3)

    async def __aenter__(self) -> "HeldRequest":
        for number in range(len(self.setup.engines)):
            await self.client.add_request_async(asked(f"busy{number}", length=9))
        await self.client.add_request_async(self.late)
        assert self.engine_requests() == []
        return self

    async def __aexit__(self, *error: object) -> None:
        await turn()

    def engine_requests(self) -> list[FakeRequest]:
        """The requests named `late` that engines have received."""
        engines = self.setup.engines
        return [one for each in engines for one in each.seen if one.request_id == "late"]

    async def until_free(self) -> None:
        for _ in range(9):
            await self.setup.step(0)


def test_scheduler_holds_request_until_a_slot_is_free() -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            assert len(held_request.client.reqs_in_flight) == 2, (
                "the engine's books know what it has"
            )
            await held_request.until_free()
            assert held_request.engine_requests() == [held_request.late]
            assert held_request.client.reqs_in_flight["late"] == held_request.client.core_engines[0]
            assert held_request.late.data_parallel_rank is None, (
                "a choice is not what was asked for"
            )

    run(work())


def test_scheduler_decides_without_a_rank_that_is_stuck() -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            for _ in range(8):
                await held_request.setup.step(0)
                await held_request.setup.step(1)
            await held_request.setup.step(0)
            assert held_request.engine_requests() == [], "rank 1 has not told of this step"
            held_request.clock.advance(2 * STEP_TIMEOUT_SECONDS)
            await turn()
            assert held_request.engine_requests() == [held_request.late]

    run(work())


def test_scheduler_loads_are_of_requests_that_ranks_have_got() -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            scheduler, [_, rank] = held_request.client.scheduler, held_request.setup.engines
            for _ in range(8):
                await held_request.setup.step(0)
                await held_request.setup.step(1)
            assert scheduler._rank_loads() == [(1, 4 + 8), (1, 4 + 8)]
            for outputs in (*held_request.setup.engines[0].step().values(), *rank.step().values()):
                scheduler.on_outputs(outputs)
            held_request.clock.end_turn()
            [late] = scheduler.requests
            assert (late.delivery, late.worker) == (Delivery.READY, 0)
            assert scheduler._rank_loads() == [(0, 0), (0, 0)]
            await turn()
            assert scheduler._rank_loads() == [(1, 4), (0, 0)]

    run(work())


def test_scheduler_never_sends_request_aborted_while_held() -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            before = COUNTERS.read()["aborted_requests"]
            await held_request.client.abort_requests_async(["late", "busy1"])
            assert COUNTERS.read()["aborted_requests"] == before + 2
            assert held_request.setup.engines[1].reached == ["busy1"]
            await held_request.setup.run_out()
            assert held_request.engine_requests() == []
            assert held_request.setup.idle

    run(work())


def test_scheduler_shows_aborted_request_with_kv_transfer_to_engine() -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            held_request.late.sampling_params = SimpleNamespace(
                extra_args={"kv_transfer_params": {}}
            )
            await held_request.client.abort_requests_async(["late"])
            [engine_request] = held_request.engine_requests()
            assert engine_request.abort_immediately
            await held_request.setup.run_out()
            assert not held_request.client.reqs_in_flight

    run(work())


def test_scheduler_sends_overdue_request_by_the_engine_rule() -> None:
    async def work() -> None:
        async with HeldRequest(queue_timeout=5) as held_request:
            before = COUNTERS.read()
            held_request.clock.advance(4)
            await turn()
            assert held_request.engine_requests() == []
            held_request.clock.advance(2)
            await turn()
            assert held_request.engine_requests() == [held_request.late]
            after = COUNTERS.read()
            assert after["fallback_requests"] == before["fallback_requests"] + 1
            assert after["routed_requests"] == before["routed_requests"]
            await held_request.setup.run_out()
            assert held_request.setup.ended["late"] == 1

    run(work())


def test_scheduler_sends_overdue_request_without_further_events() -> None:
    async def work() -> None:
        setup = deploy(1, 2, policy="fit", queue_timeout=0)
        for name in ("busy0", "busy1", "late"):
            await setup.clients[0].add_request_async(asked(name, length=9))
        while len([one for each in setup.engines for one in each.seen]) < 3:
            await asyncio.sleep(0.01)
        assert setup.clients[0].scheduler.mode is RoutingMode.POLICY

    run(work())


def test_scheduler_sends_overdue_request_to_its_pinned_rank() -> None:
    async def work() -> None:
        async with HeldRequest(queue_timeout=5) as held_request:
            pinned_request = asked("pinned", rank=1)
            await held_request.client.add_request_async(pinned_request)
            held_request.clock.advance(6)
            await turn()
            assert held_request.setup.engines[1].seen[-1] == pinned_request

    run(work())


@pytest.mark.parametrize("pause", ["pause_scheduler_async", "pause_generation_async"])
def test_scheduler_abort_all_ends_held_requests_like_engine(
    engine_names: list[str], pause: str
) -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            await getattr(held_request.client, pause)("keep")
            await held_request.client.sleep_async(1, "wait")
            assert held_request.client.outputs_queue.empty()
            await getattr(held_request.client, pause)()
            outputs = held_request.client.outputs_queue.get_nowait()
            assert [(one.request_id, one.finish_reason) for one in outputs.outputs] == [
                ("late", "abort")
            ]
            assert held_request.client.paused == ["keep", "wait", "abort"]
            await held_request.client.sleep_async()
            assert held_request.client.outputs_queue.empty()
            await held_request.setup.run_out()
            assert held_request.engine_requests() == []
        assert engine_names == ["ABORT"]

    run(work())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FailingPolicy", "PolicyFailingAfterEvent"])
@given(failing=st.integers(0, 40), actions=st.lists(ACTS, min_size=10, max_size=40))
def test_scheduler_stops_calling_failed_policy_and_loses_nothing(
    kind: str, failing: int, actions: list[Act]
) -> None:
    async def work() -> None:
        play = Play(deploy(SLOTS, ENGINES, policy=f"helpers.fakes.failing_policies:{kind}"))
        scheduler, before = play.setup.clients[0].scheduler, COUNTERS.read()["dp_policy_failures"]
        policy = scheduler.policy
        assert isinstance(policy, FailingPolicy)
        policy.left = failing
        for action in actions:
            await play.act(*action)
        await play.finish()
        assert policy.failed == (scheduler.mode is RoutingMode.ENGINE)
        assert policy.after == 0
        assert COUNTERS.read()["dp_policy_failures"] == before + policy.failed

    run(work())


def test_scheduler_treats_impossible_assignment_as_policy_failure() -> None:
    async def work() -> None:
        setup = deploy(1, 2, policy="helpers.fakes.failing_policies:UnknownWorkerPolicy")
        await setup.clients[0].add_request_async(asked("one"))
        assert setup.clients[0].scheduler.mode is RoutingMode.ENGINE
        assert len([one for each in setup.engines for one in each.seen]) == 1

    run(work())


def test_scheduler_raises_send_error_to_caller_and_forgets_request() -> None:
    async def work() -> None:
        setup = deploy(1, 2, policy="fit", queue_timeout=LATER)
        client = setup.clients[0]
        client.broken.add("odd")
        with pytest.raises(OSError, match="does not take"):
            await client.add_request_async(asked("odd"))
        assert client.scheduler.requests == ()
        assert client.scheduler.mode is RoutingMode.POLICY

    run(work())


def test_scheduler_ends_held_request_with_error_when_send_fails(engine_names: list[str]) -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            held_request.client.broken.add("late")
            await held_request.until_free()
            outputs = held_request.client.outputs_queue.get_nowait()
            assert [one.request_id for one in outputs.outputs] == ["late"]
            assert engine_names == ["ERROR"]
            assert "late" not in [one.id for one in held_request.client.scheduler.requests]

    run(work())


def test_scheduler_stays_silent_about_held_requests_of_dead_engine(engine_names: list[str]) -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            held_request.client.resources.engine_dead = True
            await held_request.until_free()
            assert held_request.client.outputs_queue.empty()
            assert engine_names == []
            while len(asyncio.all_tasks()) > 1:  # until polling has ended
                await asyncio.sleep(0.01)
            assert held_request.engine_requests() == []

    run(work())


def test_scheduler_passes_each_report_to_policy_once() -> None:
    async def work() -> None:
        setup = deploy(1, 2, policy="helpers.fakes.late_binding_policy:LateBinding")
        client = setup.clients[0]
        policy = client.scheduler.policy
        assert isinstance(policy, LateBinding)
        await client.add_request_async(asked("one"))
        assert policy.reports == [], "what stands there before the first report is none"
        client.lb_engines = [[1, 2, 0.25], [0, 0, 0.0]]
        for name in ("two", "three"):
            await client.add_request_async(asked(name))
        assert [worker for worker, _ in policy.reports] == [0, 1]
        first = policy.reports[0][1]
        assert (first.waiting, first.running, first.tokens, first.kv_usage) == (1, 2, 250, 0.25)

    run(work())


@pytest.mark.parametrize(
    "given_up", [asked("x", rank=7), replace(asked("x", rank=0), abort_immediately=True)]
)
def test_scheduler_leaves_invalid_rank_and_immediate_abort_to_engine(given_up: FakeRequest) -> None:
    async def work() -> None:
        async with HeldRequest() as held_request:
            if given_up.data_parallel_rank == 7:
                with pytest.raises(IndexError):
                    await held_request.client.add_request_async(given_up)
            else:
                await held_request.client.add_request_async(given_up)
                assert held_request.setup.engines[0].reached == ["x"]
            assert "x" not in [one.id for one in held_request.client.scheduler.requests]

    run(work())


def test_scheduler_sends_late_interaction_request_to_engine_with_its_state(
    engine_names: list[str],
) -> None:
    async def work() -> None:
        setup = deploy(4, 2, policy="fit")
        await setup.clients[0].add_request_async(replace(asked("x"), pooling_params="for 1"))
        assert [len(one.seen) for one in setup.engines] == [0, 1]
        assert engine_names == []

    run(work())


def test_client_without_routing_settings_is_unchanged() -> None:
    async def work() -> None:
        setup = deploy(1, 2)
        client, before = setup.clients[0], COUNTERS.read()
        for number in range(4):
            await client.add_request_async(asked(f"r{number}"))
        assert [len(one.seen) for one in setup.engines] == [2, 2]
        await client.abort_requests_async(["r0"])
        await client.pause_scheduler_async()
        await setup.step(0)
        assert client.equipoise_scheduler is None
        assert COUNTERS.read() == before

    run(work())


@pytest.mark.parametrize("room", [None, 10])
@given(size=st.integers(0, 30))
def test_scheduler_caps_request_size_at_room_of_a_rank(room: int | None, size: int) -> None:
    async def work() -> None:
        setup = deploy(1, 2, policy="helpers.fakes.late_binding_policy:LateBinding", kv_tokens=room)
        await setup.clients[0].add_request_async(asked("one", size=size))
        [request] = setup.clients[0].scheduler.requests
        assert request.size == max(1, size if room is None else min(size, room))

    run(work())
