"""The checks of `request_play` see every mistake below, and none where there is none."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from helpers.fakes.fake_core_client import Release, deploy
from helpers.harnesses.request_routing_scenario import ENGINES, LATER, SLOTS, Play, drawn, run

from equipoise.balancer.requests.dispatcher import (
    CloseReason,
    DispatchedRequest,
    RequestClosed,
    RequestDispatcher,
)
from equipoise.integrations.vllm.dp.client_view import ClientView
from equipoise.integrations.vllm.dp.scheduler import Delivery, DpRequest, DpRequestScheduler

SEEDS = range(60)


def _policy_not_notified(self: DpRequestScheduler, request: DpRequest) -> None:
    """Removes the request without notifying the policy."""
    self._requests.pop(request.id)
    request.messages.clear()


def _sent_all_the_same(self: DpRequestScheduler, request: DpRequest) -> None:
    self._requests.pop(request.id)
    self.dispatcher.abort(request)


async def _at_once(self: DpRequestScheduler, request: Any, send: Any) -> None:
    """Every part of an input is sent as it comes, before what is held of it."""
    if any(one.id == request.request_id for one in self.requests):
        await send(request)
    else:
        await self._enter(request, send)


def _elsewhere(self: DpRequestScheduler, request: DpRequest) -> int | None:
    rank = RANK_FOR(self, request)
    return None if rank is None else (rank + 1) % ENGINES


def _never_sent(self: DpRequestScheduler, request: DpRequest) -> int | None:
    return request.worker


def _ended_unheard(self: DpRequestScheduler, outputs: Any) -> None:
    outputs.finished_requests = None
    OBSERVE(self, outputs)


def _unpinned(self: ClientView, request: Any) -> None:
    return None


def _first_report(self: ClientView, shares: Any) -> Any:
    """Ranks have what they had then."""
    first = FIRST.setdefault(self, REPORTS(self, shares))
    if not first:
        del FIRST[self]
    return first


async def _aborted_by_the_engine(self: DpRequestScheduler, requests: Any, abort: Any) -> None:
    await abort(requests)


def _parts_by_the_rule(self: DpRequestScheduler, request: DpRequest) -> int | None:
    """What older clients need is left out."""
    return None if request.delivery is Delivery.SENT else RANK_FOR(self, request)


def _still_known(
    self: RequestDispatcher, request: DispatchedRequest, closed: RequestClosed
) -> None:
    self._cancel(request, closed)


def _overdue_twice(self: DpRequest, reason: CloseReason) -> None:
    CLOSED(self, reason)
    self.messages.append(self.messages[0])


def _finished_all(self: RequestDispatcher, request: DispatchedRequest) -> None:
    """Reports requests that were taken from the policy as finished, too."""
    if isinstance(request.status, RequestClosed):
        self._pending_ends.append(request.request_id)
        self._schedule_flush()
    FINISH(self, request)


OBSERVE, RANK_FOR = DpRequestScheduler.on_outputs, DpRequestScheduler._rank_for
CLOSED, FINISH = DpRequest.on_closed, RequestDispatcher.finish
REPORTS = ClientView.new_reports
FIRST: WeakKeyDictionary[ClientView, Any] = WeakKeyDictionary()
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "an abort does not reach the policy": (DpRequestScheduler, "_remove", _policy_not_notified),
    "what was given up is sent": (DpRequestScheduler, "_remove", _sent_all_the_same),
    "an abort of what is held is left to the engine": (
        DpRequestScheduler,
        "abort",
        _aborted_by_the_engine,
    ),
    "a part overtakes the one before": (DpRequestScheduler, "add", _at_once),
    "another rank than the policy chose": (DpRequestScheduler, "_rank_for", _elsewhere),
    "what is sent is not noted": (DpRequestScheduler, "_rank_for", _never_sent),
    "what the policy bound is not sent": (
        DpRequestScheduler,
        "_may_be_sent",
        lambda self, request, closed: None,
    ),
    "the end of a request is not told": (DpRequestScheduler, "on_outputs", _ended_unheard),
    "what is given up is told as finished": (RequestDispatcher, "finish", _finished_all),
    "a rank that was asked for is not told": (ClientView, "required_rank", _unpinned),
    "a report stands for ever": (ClientView, "new_reports", _first_report),
    "parts of an input go by the older rule": (
        DpRequestScheduler,
        "_rank_for",
        _parts_by_the_rule,
    ),
    "what is overdue stays in the policy": (RequestDispatcher, "_give_up", _still_known),
    "what is overdue is sent twice": (DpRequest, "on_closed", _overdue_twice),
}


def some_play_fails() -> bool:
    """Whether some play comes to a bad end: with one client or with two, held too long or not, and
    with an older client, which only has parts of its own go where the first went."""
    sites = [(Release.NEW, 5.0), (Release.NEW, LATER), (Release.OLD, LATER)]
    for seed in SEEDS:
        try:
            play(seed, 1 + seed % 2, *sites[seed // 2 % len(sites)])
        except Exception:  # an assertion, or whatever the mistake leads to
            return True
    return False


def play(seed: int, clients: int, release: Release, hold: float) -> None:
    async def work() -> None:
        routing = {"policy": "fit", "queue_timeout": hold}
        one = Play(deploy(SLOTS, ENGINES, clients, release=release, **routing))
        for action in drawn(seed, 60):
            await one.act(*action)
        await one.finish()
        one.look_at_policies()

    run(work())


def test_healthy_request_routing_passes_all_plays() -> None:
    assert not some_play_fails()


@pytest.mark.parametrize("name", MUTANTS)
def test_request_routing_mutant_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    assert some_play_fails()
