"""What a run plays, and what it says of clauses whose capability is not declared."""

import pytest
from helpers.fakes.null_progress_listener import NullProgressListener

from equipoise.hal.capabilities import Capabilities
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.profile import Executor, Profile
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.result import Finding, Status
from equipoise.hal.conformance.runner import (
    ConformanceRun,
    PropertyRun,
    RunOptions,
    run_properties,
)
from equipoise.report.conformance import headline

MACHINE = "accelerator-state-machine-matches-its-model"
LOCK = "one-signal-lets-one-waiter-go-on"


class Accepting:
    """Plays nothing, and finds nothing wrong."""

    name = "accepting"

    def __init__(self, stream_lock: bool) -> None:
        self.traits = Traits(Capabilities(stream_lock=stream_lock), None, (1,), controlled=True)

    def play(self, prop: Property, case: Case) -> None:
        pass

    def close(self) -> None:
        pass


def finding_of(name: str, stream_lock: bool) -> Finding:
    run = PropertyRun(suite.find(name), Accepting(stream_lock), Executor.DEVICE)
    options = RunOptions(Profile.CI, seed=0, cases=1)
    (finding,) = run_properties([run], options, NullProgressListener())
    return finding


@pytest.mark.parametrize("stream_lock", [True, False])
def test_state_machine_judges_lock_clauses_where_lock_is_declared(stream_lock: bool) -> None:
    finding = finding_of(MACHINE, stream_lock)
    assert finding.status is Status.HELD
    assert ("L3" in finding.clauses) is stream_lock
    assert "V5" in finding.clauses


def test_lock_property_without_lock_leaves_its_clauses_unsupported() -> None:
    finding = finding_of(LOCK, stream_lock=False)
    assert finding.status is Status.UNSUPPORTED
    assert finding.clauses == ("L1",)


def test_run_without_communicator_judges_device_by_itself() -> None:
    run = ConformanceRun(
        backend="cpu",
        communicator="",
        ranks=4,
        profile=Profile.CI,
        families=("resources",),
        seed=0,
        cases=1,
    )
    result = run.run(NullProgressListener())
    assert result is not None
    assert {finding.executor for finding in result.findings} == {Executor.DEVICE}
    assert headline(result) == "conformance of cpu by itself, profile ci, seed 0"
