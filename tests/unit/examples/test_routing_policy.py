"""The example of a policy of one's own keeps the protocol, in any order of events."""

from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
from helpers.harnesses.dispatcher_machine import machine
from helpers.paths import ROOT
from hypothesis.stateful import run_state_machine_as_test

from equipoise import Request, RoutingPolicy, WorkerChange, WorkerState
from equipoise.balancer.requests.dispatcher import FailureAction


@pytest.fixture(scope="module")
def example() -> Any:
    spec = spec_from_file_location("routing_policy", ROOT / "examples" / "routing_policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FewestRequests


def test_example_policy_keeps_protocol_in_any_order_of_events(example: Any) -> None:
    run_state_machine_as_test(machine(example, FailureAction.STOP_POLICY))


def test_example_policy_requeues_what_a_lost_worker_had_not_begun(example: Any) -> None:
    policy: RoutingPolicy = example([2, 1], [None, None])
    targets = [
        assignment.worker
        for name in "abc"
        for assignment in policy.on_arrival(Request(id=name, size=1)).assignments
    ]
    assert targets == [0, 1, 0]
    policy.on_tokens({"a": 1})
    decision = policy.on_worker_change(WorkerChange(worker=0, state=WorkerState.LOST))
    assert (decision.lost, decision.assignments) == (("a",), ())
    assert [one.request for one in policy.on_finish("b").assignments] == ["c"]
