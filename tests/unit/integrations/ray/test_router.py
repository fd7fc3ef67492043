"""The request router over made-up replicas: whatever happens, the books stay right."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.event_loop import in_event_loop
from helpers.fakes.failing_policies import FailingPolicy
from helpers.fakes.fake_ray_serve import (
    ActorDied,
    FakeCluster,
    PendingRequest,
    RequestRouter,
    RunningReplica,
    SentRequest,
    fake_ray,
)
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.dispatcher import CloseReason, RequestClosed, Running
from equipoise.balancer.requests.policy import WorkerState
from equipoise.integrations.ray import compatibility, doctor, replica_pool
from equipoise.integrations.vllm.compatibility import Release

FAILING = "helpers.fakes.failing_policies:FailingPolicy"
REPLICAS = tuple("abcd")
NUMBERS = st.integers(0, 1 << 16)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), NUMBERS),
        st.tuples(st.sampled_from(["accept", "reject", "finish", "cancel"]), NUMBERS),
        st.tuples(st.just("list"), st.sets(st.sampled_from(REPLICAS))),
        st.tuples(st.just("kill"), st.sampled_from(REPLICAS)),
        st.tuples(st.just("turn"), NUMBERS),
    ),
    max_size=60,
)


@pytest.fixture(autouse=True)
def _no_overtaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a word that may be late waits one turn of the loop."""
    monkeypatch.setattr(replica_pool, "OVERTAKING_SECONDS", 0.0)


@pytest.fixture(scope="module")
def ray_router() -> Iterator[Any]:
    with fake_ray() as module:
        yield module


async def turns(number: int = 12) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def router_of(module: Any, *replicas: str, slots: int = 2, **settings: Any) -> Any:
    router = module.EquipoiseRequestRouter(strict=settings.pop("strict", True))
    router.initialize_state(**settings)
    router.update_replicas([RunningReplica(one, slots) for one in replicas])
    return router


def cluster_of(module: Any, *replicas: str, **settings: Any) -> tuple[Any, FakeCluster]:
    """A router, and the cluster of its replicas; settings as of `router_of`."""
    router = router_of(module, *replicas, **settings)
    return router, FakeCluster(router)


async def send(cluster: FakeCluster) -> tuple[asyncio.Task[str], SentRequest]:
    """A call that is sent to a replica, as the only one that is."""
    call = cluster.call("x")
    await turns()
    (sending,) = cluster.open
    return call, sending


async def begin(cluster: FakeCluster) -> tuple[asyncio.Task[str], SentRequest]:
    """As `send`; the replica takes it."""
    call, sending = await send(cluster)
    cluster.accept(sending)
    await turns()
    return call, sending


class Driver:
    """A router over a made-up cluster, and the calls of its users."""

    def __init__(self, module: Any) -> None:
        self.router = router_of(module)
        self.cluster = FakeCluster(self.router)
        self.calls: list[asyncio.Task[str]] = []
        self.deaths = Counter[str]()

    async def apply(self, event: str, how: Any) -> None:
        cluster = self.cluster
        match event:
            case "call":
                # Two of three share their id, as calls of one request do.
                name = None if how % 3 else "shared"
                self.calls.append(cluster.call("x" * (how % 100), call=name))
            case "list":
                self.router.update_replicas([RunningReplica(self.name(one)) for one in sorted(how)])
            case "kill":
                cluster.kill(self.name(how))
                self.deaths[how] += 1
            case "cancel" if self.calls:
                self.calls[how % len(self.calls)].cancel()
            case "turn":
                await turns(1 + how % 3)
            case "accept" | "reject" | "finish" if cluster.open:
                sending = cluster.open[how % len(cluster.open)]
                if event == "reject":
                    cluster.reject(sending, overtake=bool(how & 1))
                else:
                    getattr(cluster, event)(sending)
        self.check()

    def name(self, replica: str) -> str:
        """A dead actor does not come back under its id."""
        return f"{replica}{self.deaths[replica]}"

    def check(self) -> None:
        pool = self.router.pool
        if pool is None:
            return
        assert not pool.stopped
        assert pool.dispatcher.policy_errors == 0
        for one in pool.replicas:
            assert len(pool.view(one).requests) <= 2
        serving = sum(v.state is WorkerState.SERVING for v in pool.dispatcher.workers)
        assert serving <= len(self.router._replicas)

    async def end(self) -> None:
        """Serve everything; then nothing is left, and each slot takes one request again."""
        fresh = [RunningReplica(f"new-{one}") for one in REPLICAS]
        self.router.update_replicas(fresh)
        while not all(one.done() for one in self.calls):
            self.cluster.finish_all()
            await turns()
        for call in self.calls:
            with suppress(asyncio.CancelledError, ActorDied):
                await call  # of a replica that died after it had begun
        await asyncio.sleep(0.002)
        pool = self.router.pool
        assert not pool.dispatcher.requests
        assert pool.attempts == 0
        assert all(not view.requests and not view.load for view in pool.dispatcher.workers)
        assert set(pool.replicas) == {one.replica_id for one in fresh}
        calls = [self.cluster.call("x") for _ in range(2 * len(REPLICAS) + 1)]
        await turns()
        assert len(self.cluster.open) == 2 * len(REPLICAS)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@given(events=EVENTS)
@in_event_loop
async def test_books_stay_right_whatever_replicas_and_callers_do(
    ray_router: Any, events: Sequence[tuple[str, Any]]
) -> None:
    driver = Driver(ray_router)
    for event, how in events:
        await driver.apply(event, how)
    await driver.end()


@in_event_loop
async def test_request_waits_until_a_slot_is_free(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", slots=1)
    first, second = cluster.call("x"), cluster.call("x")
    await turns()
    assert len(cluster.open) == 1
    assert router.pool.queued == 1
    cluster.finish(cluster.open[0])
    assert await first == "a"
    await turns()
    cluster.finish(cluster.open[0])
    assert await second == "a"
    assert router.counts == {"policy": 2}


@in_event_loop
async def test_request_of_a_dead_replica_is_served_by_another(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", "b")
    calls = [cluster.call("x") for _ in range(4)]
    await turns()
    begun = next(one for one in cluster.open if one.replica_id == "a")
    cluster.accept(begun)
    await turns()
    cluster.kill("a")
    for _ in range(6):
        await turns()
        cluster.finish_all()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(map(str, answers)) == ["a", "b", "b", "b"]
    assert sum(isinstance(one, ActorDied) for one in answers) == 1
    assert router.pool.replicas == ("b",)


@pytest.mark.parametrize("overtake", [False, True])
@in_event_loop
async def test_rejected_request_goes_to_another_replica(ray_router: Any, overtake: bool) -> None:
    router, cluster = cluster_of(ray_router, "a", "b", slots=1)
    call, sending = await send(cluster)
    cluster.reject(sending, overtake=overtake)
    await turns()
    (again,) = cluster.open
    assert again.replica_id != sending.replica_id
    cluster.finish(again)
    await call
    assert router.backoffs == [0]
    assert router.counts == {"policy": 2, "retried": 1}


@in_event_loop
async def test_rejection_that_is_heard_of_late_leads_to_another_attempt(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call, sending = await send(cluster)
    cluster.end(sending)
    await asyncio.sleep(0.002)
    assert not router.pool.dispatcher.requests
    cluster.reject(sending)
    await turns()
    cluster.finish(cluster.open[0])
    assert await call == "a"
    assert router.backoffs == [0]
    assert router.counts == {"policy": 2, "retried": 1}


@in_event_loop
async def test_replica_that_was_taken_for_dead_may_answer(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", "b", slots=1)
    call, sending = await send(cluster)
    router.on_replica_actor_died(sending.replica_id)
    (request,) = router.pool.dispatcher.requests
    assert router.pool.replica(request.status) != sending.replica_id
    cluster.accept(sending)
    await turns()
    assert not router.pool.dispatcher.requests
    cluster.finish(sending)
    assert await call == sending.replica_id
    assert router.pool.attempts == 0


@in_event_loop
async def test_only_replica_that_rejects_is_asked_again_after_a_pause(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", slots=1)
    call = cluster.call("x")
    for _ in range(3):
        await turns()
        cluster.reject(cluster.open[0])
    await turns()
    cluster.finish(cluster.open[0])
    assert await call == "a"
    assert router.backoffs == [0, 1, 2]


@in_event_loop
async def test_end_that_overtakes_the_acceptance_counts_as_finished(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call = cluster.call("x")
    await turns()
    (request,) = router.pool.dispatcher.requests
    cluster.finish(cluster.open[0])
    await call
    await asyncio.sleep(0.002)
    assert request.status == RequestClosed(CloseReason.FINISHED)
    assert not router.pool.dispatcher.requests


@in_event_loop
async def test_replica_that_leaves_the_list_keeps_what_it_has_begun(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call, sending = await begin(cluster)
    router.update_replicas([RunningReplica("b")])
    assert set(router.pool.replicas) == {"a", "b"}
    assert len(router.pool.view("a").requests) == 1
    cluster.finish(sending)
    assert await call == "a"
    await turns()
    assert router.pool.replicas == ("b",)


@in_event_loop
async def test_replica_that_comes_back_gets_requests_again(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    first, _ = await begin(cluster)
    router.update_replicas([])
    second = cluster.call("x")
    await turns()
    assert router.pool.queued == 1
    router.update_replicas([RunningReplica("a")])
    await turns()
    cluster.finish_all()
    assert [await first, await second] == ["a", "a"]


@in_event_loop
async def test_request_that_was_bound_to_a_leaving_replica_moves(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call = cluster.call("x")
    await asyncio.sleep(0)  # bound, and its task has chosen
    router.update_replicas([RunningReplica("b")])
    cluster.reject(cluster.open[0])
    await turns()
    (again,) = cluster.open
    assert again.replica_id == "b"
    cluster.finish(again)
    assert await call == "b"


@in_event_loop
async def test_replica_that_was_reserved_and_not_used_gets_its_slot_back(
    ray_router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router, cluster = cluster_of(ray_router, "a", slots=1)
    router.pool._silence = 0.01
    pending = cluster.call("x")
    await turns()
    cluster.open.clear()  # a caller of choose_replica that sends nothing
    second = cluster.call("x")
    await turns()
    assert router.pool.queued == 1
    await asyncio.sleep(0.1)
    cluster.finish(cluster.open[0])
    assert await second == "a"
    pending.cancel()
    assert "Ray has said nothing of it" in caplog.text


@in_event_loop
async def test_long_answer_is_no_silence(ray_router: Any, caplog: pytest.LogCaptureFixture) -> None:
    router, cluster = cluster_of(ray_router, "a")
    router.pool._silence = 0.01
    call, sending = await send(cluster)
    cluster.accept(sending)
    await asyncio.sleep(0.1)
    assert len(router.pool.view("a").requests) == 1
    cluster.finish(sending)
    await call
    assert not caplog.text


@in_event_loop
async def test_slot_is_free_again_where_ray_asks_no_replica(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", slots=1, strict=False)
    calls = [cluster.call("x") for _ in range(3)]
    for _ in calls:
        await turns()
        (request,) = router.pool.view("a").requests.values()
        assert isinstance(request.status, Running)
        cluster.finish(cluster.open[0])
    assert await asyncio.gather(*calls) == ["a"] * 3


@in_event_loop
async def test_capacity_of_a_replica_may_change(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", slots=1)
    calls = [cluster.call("x") for _ in range(4)]
    await turns()
    router.update_replicas([RunningReplica("a", 3)])
    await turns()
    assert len(cluster.open) == 3
    for call in calls:
        call.cancel()


@in_event_loop
async def test_generated_tokens_are_divided_among_running_requests(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a", slots=2)
    calls = [cluster.call("x") for _ in range(2)]
    await turns()
    for sending in cluster.open:
        cluster.accept(sending)
    await turns()
    for stats in (
        {"generated_tokens": 100},
        {"generated_tokens": 111},  # one is left of the division
        {"generated_tokens": 116, "ongoing_requests": 3},  # one is another router's
    ):
        router.update_replicas([RunningReplica("a", 2, stats)])
    requests = router.pool.view("a").requests.values()
    assert [one.tokens for one in requests] == [1 + 5 + 2] * 2
    # Another life of it: nobody knows when its tokens were made.
    cluster.kill("a")
    await asyncio.gather(*calls, return_exceptions=True)
    router.update_replicas([RunningReplica("a", 2)])
    later, _ = await begin(cluster)
    router.update_replicas([RunningReplica("a", 2, {"generated_tokens": 1_000})])
    assert [one.tokens for one in router.pool.view("a").requests.values()] == [1]
    later.cancel()


COUNTS: st.SearchStrategy[Any] = st.sampled_from(
    [None, "7", b"7", [], True, -1, 1.5, 2.0, float("nan"), float("inf"), 1 << 31, 1 << 80, 5]
)


@given(
    statistics=st.lists(
        st.fixed_dictionaries({}, optional={"generated_tokens": COUNTS, "ongoing_requests": COUNTS})
        | COUNTS,
        max_size=8,
    )
)
@in_event_loop
async def test_router_serves_whatever_a_replica_publishes(
    ray_router: Any, statistics: Sequence[Any]
) -> None:
    router, cluster = cluster_of(ray_router, "a")
    calls = [cluster.call("x") for _ in range(2)]
    await turns()
    cluster.accept(cluster.open[0])
    await turns()
    for one in ({"generated_tokens": 0}, *statistics):
        router.update_replicas([RunningReplica("a", 2, one)])
        await turns()
    assert not router.pool.stopped
    cluster.finish_all()
    assert await asyncio.gather(*calls) == ["a", "a"]
    assert router.counts == {"policy": 2}


@pytest.mark.parametrize(
    ("ongoing", "tokens"),
    [(None, 6), ("2", 6), (1.5, 6), (-3, 6), (2.0, 3), (2, 3)],
)
@in_event_loop
async def test_ongoing_requests_that_are_no_count_are_ignored(
    ray_router: Any, ongoing: Any, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call, _ = await begin(cluster)
    for generated in (10, 12, 16.0):
        stats = {"generated_tokens": generated, "ongoing_requests": ongoing}
        router.update_replicas([RunningReplica("a", 2, stats)])
    (request,) = router.pool.view("a").requests.values()
    assert request.tokens == 1 + tokens
    call.cancel()
    assert caplog.text.count("ongoing_requests has to be a count") == (tokens == 6)


@in_event_loop
async def test_jump_of_a_counter_is_bounded(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call, _ = await begin(cluster)
    for generated in (0, 1 << 40, (1 << 40) + 3):
        router.update_replicas([RunningReplica("a", 2, {"generated_tokens": generated})])
    (request,) = router.pool.view("a").requests.values()
    assert request.tokens == 1 + replica_pool.MAX_SHARE + 3
    call.cancel()


@in_event_loop
async def test_failed_policy_leaves_the_choice_to_ray(
    ray_router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router, cluster = cluster_of(
        ray_router, "a", slots=1, policy="helpers.fakes.failing_policies:FailingPolicy"
    )
    policy = router.pool.dispatcher.policy
    calls = [cluster.call("x") for _ in range(3)]
    await turns()
    policy.left = 0  # at its next event
    cluster.finish(cluster.open[0])
    await turns()
    calls.append(cluster.call("x"))
    router.update_replicas([RunningReplica("a"), RunningReplica("b")])
    for _ in range(4):
        await turns()
        cluster.finish_all()
    assert await asyncio.gather(*calls) == ["a"] * 4
    assert router.counts == {"policy": 1, "policy_failed": 3}
    assert caplog.text.count("the policy failed") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "best"}, "unknown name 'best'"),
        ({"policy_options": {"window": -1}}, "window"),
        ({"request_size": "no_such:thing"}, "does not import"),
        ({"size": 1}, "unexpected keyword"),
        ({"policy": 3}, "policy has to be a name or PACKAGE:OBJECT, got 3"),
        ({"policy_options": "lockstep=false"}, "policy_options has to be a mapping"),
        ({"request_size": 5}, "request_size has to be PACKAGE:OBJECT, got 5"),
        ({"policy": "json:dumps"}, "makes no policy"),
        ({"policy": f"{__name__}:policy_once"}, "no second policy"),
    ],
)
@in_event_loop
async def test_bad_settings_leave_the_choice_to_ray(
    ray_router: Any,
    settings: dict[str, Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    CREATED.clear()
    router, cluster = cluster_of(ray_router, "a", **settings)
    call = cluster.call("x")
    await turns()
    cluster.finish(cluster.open[0])
    assert await call == "a"
    assert router.counts == {"no_policy": 1}
    assert message in caplog.text
    assert len(caplog.records) == 1


CREATED: list[FailingPolicy] = []


def policy_once(slots: Sequence[int], kv_tokens: Sequence[int | None]) -> FailingPolicy:
    """Created when the settings are read, and not when the first replica is there."""
    if CREATED:
        raise RuntimeError("no second policy")
    CREATED.append(FailingPolicy(slots, kv_tokens))
    return CREATED[0]


@in_event_loop
async def test_ray_without_the_hook_leaves_the_choice_to_ray(
    ray_router: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RequestRouter, "on_request_completed")
    assert router_of(ray_router, "a").pool is None
    assert "RequestRouter.on_request_completed is missing" in caplog.text


@pytest.mark.parametrize("name", compatibility.ROUTER_ATTRIBUTES)
@in_event_loop
async def test_ray_without_an_attribute_leaves_the_choice_to_ray(
    ray_router: Any, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialize = RequestRouter.__init__

    def initialize_without(router: RequestRouter, strict: bool) -> None:
        initialize(router, strict)
        delattr(router, name)

    monkeypatch.setattr(RequestRouter, "__init__", initialize_without)
    router = router_of(ray_router, "a")
    assert router.pool is None
    pending = PendingRequest(["x"], {}, SimpleNamespace(multiplexed_model_id=""))
    assert (await router._choose_replica_for_request(pending)).replica_id == "a"
    assert router.counts == {"no_policy": 1}
    assert f"RequestRouter sets no {name}" in caplog.text


@pytest.mark.parametrize("broken", ["histogram", "counter", "metadata"])
@in_event_loop
async def test_choice_that_raises_leaves_no_attempt(ray_router: Any, broken: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("a mistake")

    router = router_of(ray_router, "a", slots=1)
    metadata = SimpleNamespace(multiplexed_model_id="", internal_request_id="call")
    if broken == "histogram":
        router.queue_wait_time_ms_histogram.observe = fail
    elif broken == "counter":
        router._choices.inc = fail
    else:
        del metadata.internal_request_id
    with pytest.raises((ArithmeticError, AttributeError)):
        await router._choose_replica_for_request(PendingRequest(["x"], {}, metadata))
    assert router.pool.attempts == 0
    assert not router.pool.dispatcher.requests
    assert not router.pool.view("a").requests


@pytest.mark.usefixtures("ray_router")
def test_doctor_finds_what_the_router_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "installed", lambda release: "2.60.0")
    assert [passed for _, passed, _ in doctor.examine()] == [True, True]
    monkeypatch.delattr(RequestRouter, "_backoff")
    assert [passed for _, passed, _ in doctor.examine()] == [True, False]


def test_doctor_says_what_to_install_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("equipoise.integrations.vllm.compatibility.version", find_none)
    ((name, passed, detail),) = doctor.examine()
    assert (name, passed) == ("Ray", False)
    expected = "Ray is not installed: install ray (tested: 2.60.0), by pip install '.[ray]'"
    assert detail.startswith(expected)


@in_event_loop
async def test_request_for_a_model_is_left_to_ray(ray_router: Any) -> None:
    router, cluster = cluster_of(ray_router, "a")
    call = cluster.call("x", model="adapter")
    await turns()
    cluster.finish(cluster.open[0])
    assert await call == "a"
    assert router.counts == {"multiplexed": 1}


@in_event_loop
async def test_size_function_that_fails_costs_one_line(
    ray_router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router, cluster = cluster_of(ray_router, "a", request_size=f"{__name__}:failing_size")
    calls = [cluster.call("x" * 400) for _ in range(2)]
    await turns()
    assert [one.size for one in router.pool.dispatcher.requests] == [1, 1]
    for call in calls:
        call.cancel()
    assert caplog.text.count("request_size failed") == 1


def failing_size(args: Sequence[Any], kwargs: Any) -> int:
    raise ArithmeticError("a mistake")
