"""What a communicator does not offer is declared absent, and fails no property."""

from dataclasses import replace
from typing import Any, NoReturn

import pytest
from helpers.tiers import DEEP

from equipoise.backends.virtual.backend import (
    ALL_COMMUNICATOR_CAPABILITIES,
    HEALTHY,
    VirtualBackend,
)
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.work import VirtualWork
from equipoise.hal.capabilities import Operation
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import COMMUNICATOR_FAMILIES
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.property import PropertyScope
from equipoise.hal.conformance.search import (
    PropertyUnsupported,
    PropertyViolated,
    SearchSettings,
    Verdict,
    search,
)
from equipoise.hal.errors import Unsupported

CASES = 30 if DEEP else 4
NEEDED = {
    Operation.ALL_REDUCE: "a-fault-ends-what-depends-on-it-and-nothing-else",
    Operation.ALL_TO_ALL_UNEVEN: "uneven-rows-arrive",
    Operation.BARRIER: None,
    Operation.POINT_TO_POINT: "messages-between-two-ranks-keep-their-order",
    Operation.EXCHANGE: "a-round-brings-every-blob-whole",
    Operation.CANCEL: "a-cancelled-operation-keeps-its-buffers-and-fails-its-communicator",
}
"""A property that cannot be played without the operation; of the others there is none."""
METHODS = {Operation.POINT_TO_POINT: ("isend", "irecv")}


def _refuse(*_: Any) -> NoReturn:
    raise Unsupported("this is not offered")


def verdicts_without(*absent: Operation) -> dict[str, Verdict]:
    names = [name for op in absent for name in METHODS.get(op, (op.value,))]
    lacking: dict[str, Any] = dict.fromkeys(names, _refuse)
    parts = replace(
        HEALTHY,
        communicator=type("Lacking", (VirtualCommunicator,), lacking),
        work=type("Uncancelled", (VirtualWork,), lacking) if "cancel" in names else VirtualWork,
    )
    declared = replace(
        ALL_COMMUNICATOR_CAPABILITIES, operations=frozenset(Operation) - frozenset(absent)
    )
    subject = ControlledSubject(VirtualBackend(parts, groups=declared))
    return {
        prop.name: search(prop, subject, SearchSettings(cases=CASES))
        for prop in suite.properties()
        if prop.family in COMMUNICATOR_FAMILIES
        and prop.scope is PropertyScope.GROUP
        and prop.applies_to(subject.traits)
        and (DEEP or not prop.large)
    }


@pytest.mark.parametrize("operation", list(Operation))
def test_absent_operation_fails_nothing_and_is_named(operation: Operation) -> None:
    verdicts = verdicts_without(operation)
    violated = {name: v for name, v in verdicts.items() if isinstance(v, PropertyViolated)}
    assert violated == {}
    unsupported = {
        name: v.capability for name, v in verdicts.items() if isinstance(v, PropertyUnsupported)
    }
    assert set(unsupported.values()) <= {f"operations: {operation}"}
    needed = NEEDED.get(operation)
    assert needed is None or unsupported[needed] == f"operations: {operation}"


def test_communicator_of_messages_alone_is_judged() -> None:
    messages = {Operation.POINT_TO_POINT}
    verdicts = verdicts_without(*(set(Operation) - messages))
    assert not any(isinstance(v, PropertyViolated) for v in verdicts.values())
    played = {name for name, v in verdicts.items() if not isinstance(v, PropertyUnsupported)}
    assert "messages-between-two-ranks-keep-their-order" in played
    assert "every-dtype-and-shape-is-transported" in played
