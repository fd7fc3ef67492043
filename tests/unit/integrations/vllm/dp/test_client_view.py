"""What is told of the ranks, whether they report how full they are or only how many they have."""

import asyncio
from typing import Any

import pytest
from helpers.fakes.fake_core_client import FakeEngine, Routed, configuration, patched
from helpers.fakes.fake_core_client import Release as Client
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.requests.policy import WorkerReport
from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm.compatibility import CLIENT_ATTRIBUTES
from equipoise.integrations.vllm.dp.client_view import ClientView, RankLoad
from equipoise.integrations.vllm.dp.policy import RankCapacity

ROOM = 1000
COUNTS = st.tuples(st.integers(0, 50), st.integers(0, 50))
SHARES = st.integers(0, 9).flatmap(
    lambda n: st.builds(RankLoad, st.just(n), st.integers(n, n * 100))
)
RANKS = st.lists(st.tuples(COUNTS, SHARES), min_size=1, max_size=6)


class ReportingClient:
    """The part of a client that reports are read from."""

    lb_engines: Any = None


def front_of(count: int, room: int | None = ROOM) -> tuple[ReportingClient, ClientView]:
    client = ReportingClient()
    return client, ClientView(client, RankCapacity(count, 8, room, None))


def reports_of(rows: list[list[Any]], shares: list[RankLoad], room: int | None = ROOM) -> Any:
    client, front = front_of(len(rows), room)
    client.lb_engines = rows
    return front.new_reports(lambda: shares)


def never() -> list[RankLoad]:
    raise AssertionError("nobody has to guess")


@given(st.lists(st.tuples(COUNTS, st.floats(0, 1)), min_size=1, max_size=6))
def test_front_reports_kv_usage_of_ranks_once(ranks: list[tuple[tuple[int, int], float]]) -> None:
    client, front = front_of(len(ranks))
    client.lb_engines = [[*counts, usage] for counts, usage in ranks]
    expected = tuple(
        WorkerReport(
            waiting=waiting, running=running_count, tokens=int(usage * ROOM), kv_usage=usage
        )
        for (waiting, running_count), usage in ranks
    )
    assert front.new_reports(never) == expected
    assert front.new_reports(never) == (), "read already"


@given(RANKS)
def test_front_estimates_tokens_from_known_mean_length(
    ranks: list[tuple[tuple[int, int], RankLoad]],
) -> None:
    shares = [share for _, share in ranks]
    request_total, tokens = sum(one.requests for one in shares), sum(one.tokens for one in shares)
    reports = reports_of([list(counts) for counts, _ in ranks], shares)
    for ((waiting, running), share), report in zip(ranks, reports, strict=True):
        assert (report.waiting, report.running) == (waiting, running)
        of = share if share.requests else RankLoad(request_total, tokens)
        mean = of.tokens / of.requests if of.requests else 0
        assert report.tokens == pytest.approx((waiting + running) * mean, abs=1)
        assert report.kv_usage == min(1.0, report.tokens / ROOM)


@pytest.mark.slow
@given(RANKS)
def test_front_reports_own_tokens_when_it_has_all_requests(
    ranks: list[tuple[tuple[int, int], RankLoad]],
) -> None:
    shares = [share for _, share in ranks]
    reports = reports_of([[0, share.requests] for share in shares], shares)
    assert [report.tokens for report in reports] == [share.tokens for share in shares]


def test_front_reports_no_kv_usage_without_cache_size() -> None:
    (report,) = reports_of([[1, 1]], [RankLoad(1, 10)], room=None)
    assert (report.tokens, report.kv_usage) == (20, 0.0)


@pytest.mark.parametrize("name", CLIENT_ATTRIBUTES)
def test_front_refuses_client_without_required_attribute(name: str) -> None:
    class Without(patched(Client.NEW)):  # type: ignore[misc]
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == name and vars(self).get("made"):
                raise AttributeError(attribute)
            return super().__getattribute__(attribute)

    from equipoise.integrations.vllm.dp.core_client import attach_scheduler

    async def work() -> None:
        client: Routed = Without(configuration(1, policy="fit"), [FakeEngine(1), FakeEngine(1)])
        attach_scheduler(client)
        client.made = True  # type: ignore[attr-defined]
        with pytest.raises(EngineUnsupported, match=f"vLLM's client has no {name}$"):
            attach_scheduler(client)

    asyncio.run(work())
