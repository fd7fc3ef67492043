"""A request of the proxy: what wakes its task, what ends it, and what its client is told."""

import asyncio
import logging

import pytest
from helpers.fakes.fake_openai_server import Fake
from helpers.fakes.late_binding_policy import LateBinding
from helpers.harnesses.proxy_setup import chat_request, proxied, run

from equipoise.balancer.requests.dispatcher import (
    BoundToWorker,
    CloseReason,
    RequestClosed,
    RequestDispatcher,
)
from equipoise.balancer.requests.policy import Assignment, Decision, Request
from equipoise.hal.errors import EquipoiseError
from equipoise.serve.cancel_scope import CancelReason, CancelScope, ScopeCancelled
from equipoise.serve.outcomes import RequestRefused
from equipoise.serve.proxy_request import ProxyRequest, skip_failed_event


def test_request_task_wakes_when_its_worker_is_chosen() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        dispatcher = RequestDispatcher(LateBinding([1]), 1, loop, skip_failed_event)
        first, second = ProxyRequest(0, 5), ProxyRequest(1, 5)
        dispatcher.submit(first)
        dispatcher.submit(second)
        assert await first.wait_until_bound() is first.status
        waits = asyncio.create_task(second.wait_until_bound())
        await asyncio.sleep(0)
        assert not waits.done()
        dispatcher.finish(first)
        assert (await waits).worker == 0

    run(work())


async def wait_in_scope(request: ProxyRequest) -> None:
    async with CancelScope() as scope:
        request.scope = scope
        await request.wait_until_bound()


def test_request_that_is_overdue_ends_its_task() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        dispatcher = RequestDispatcher(
            LateBinding([0]), 1, loop, skip_failed_event, queue_timeout=0.01
        )
        request = ProxyRequest(0, 5)
        dispatcher.submit(request)
        with pytest.raises(ScopeCancelled, match=CancelReason.NO_FREE_SLOT.value):
            await wait_in_scope(request)
        with pytest.raises(ScopeCancelled):
            await request.wait_until_bound()

    run(work())


ERRORS: dict[CloseReason, tuple[type[Exception], object]] = {
    CloseReason.ABORTED: (ScopeCancelled, CancelReason.WORKER_LOST),
    CloseReason.QUEUE_FULL: (RequestRefused, 429),
    CloseReason.QUEUE_TIMEOUT: (ScopeCancelled, CancelReason.NO_FREE_SLOT),
    CloseReason.WORKER_UNAVAILABLE: (RequestRefused, 503),
    CloseReason.WORKER_LOST: (ScopeCancelled, CancelReason.WORKER_LOST),
    CloseReason.POLICY_FAILED: (EquipoiseError, None),
}


@pytest.mark.parametrize("reason", ERRORS)
def test_closed_request_raises_what_its_client_is_told(reason: CloseReason) -> None:
    request = ProxyRequest(0, 5)
    request.check_open()
    request.status = RequestClosed(reason, "why")
    kind, expected = ERRORS[reason]
    with pytest.raises(kind) as error:
        request.check_open()
    match error.value:
        case RequestRefused() as refused:
            response = refused.error_response
            assert (response.status, response.message) == (expected, "why")
            assert response.headers == {"Retry-After": "1"}
        case ScopeCancelled() as cancelled:
            assert cancelled.reason is expected


def test_request_that_the_policy_refuses_gets_500_and_the_proxy_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Request) -> Decision:
        raise ValueError(request)

    async def work() -> None:
        async with proxied(Fake("w0")) as setup:
            with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
                patch.setattr(setup.policy, "on_arrival", refuse)
                answer = await setup.post(chat_request())
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            first, second = [one.message for one in caplog.records if one.levelname == "ERROR"]
            assert first == "the policy failed at an event"
            assert second.startswith("request ")
            assert second.endswith(" failed")
            assert setup.proxy.dispatcher.policy_errors == 1
            setup.proxy.dispatcher.policy_errors = 0
            assert (await setup.post(chat_request())).status == 200

    run(work())


def test_assignment_that_cannot_be_costs_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    class UnknownWorkerPolicy(LateBinding):
        def on_arrival(self, request: Request) -> Decision:
            del request
            return Decision((Assignment(99, 7),))

    async def work() -> None:
        loop = asyncio.get_running_loop()
        dispatcher = RequestDispatcher(UnknownWorkerPolicy([1]), 1, loop, skip_failed_event)
        request = ProxyRequest(0, 5)
        dispatcher.submit(request)
        assert not isinstance(request.status, BoundToWorker)
        assert caplog.messages == ["the policy cannot bind so: Assignment(request=99, worker=7)"]

    run(work())
