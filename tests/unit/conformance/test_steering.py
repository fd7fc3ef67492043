"""Devices whose schedule can be chosen: they are told it, and it is varied and shrunk."""

from collections.abc import Callable

import pytest
from helpers.fakes import wheel
from hypothesis import strategies as st

from equipoise.backends.cpu import BACKEND
from equipoise.hal.conformance.bench import Bench, Play, demand
from equipoise.hal.conformance.campaign import Campaign
from equipoise.hal.conformance.device import DeviceSubject
from equipoise.hal.conformance.profile import Executor, Profile
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.search import Effort, Held, Violated, search
from equipoise.hal.conformance.steering import steering
from equipoise.hal.conformance.strategies import SCHEDULE
from equipoise.hal.errors import UsageError
from equipoise.hal.stream import Role

BAD = {
    "steer": "is not PACKAGE:OBJECT",
    "no.such.module:steer": "does not import: ModuleNotFoundError",
    "json:no_such_name": "does not import: AttributeError",
    "math:pi": "cannot be called: 3.14",
}


def _racy(bench: Bench, _: Program) -> Play:
    """Goes wrong when the latest schedule has a choice above 100 in it."""
    yield from ()
    bench.disturb(bench.accelerator.stream(Role.COMPUTE))
    demand("O1", max(wheel.TOLD[-1], default=0) <= 100, "out of order")


def _sound(bench: Bench, _: Program) -> Play:
    yield from ()


def _property(play: Callable[[Bench, Program], Play]) -> Property:
    return Property(
        name="steered",
        family="ordering",
        clauses=("O1",),
        claim="In order.",
        programs=lambda _: st.just(program([Step("go")])),
        play=play,
    )


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    wheel.TOLD.clear()


def test_the_schedule_that_breaks_a_property_is_found_and_shrunk() -> None:
    verdict = search(_property(_racy), DeviceSubject(BACKEND, wheel.steer), Effort(cases=200))
    assert isinstance(verdict, Violated)
    assert verdict.case.schedule == b"\x65"


def test_each_case_is_steered_by_a_schedule_of_its_own_which_may_be_long() -> None:
    verdict = search(_property(_sound), DeviceSubject(BACKEND, wheel.steer), Effort(cases=60))
    assert verdict == Held(60)
    assert len(wheel.TOLD) == 60
    assert len(set(wheel.TOLD)) > 30
    assert max(map(len, wheel.TOLD)) > SCHEDULE


def test_a_device_that_cannot_be_steered_breaks_no_clause() -> None:
    steer = steering("helpers.fakes.wheel:into_nothing")
    with pytest.raises(UsageError, match="cannot steer: OSError: the driver is not there"):
        search(_property(_sound), DeviceSubject(BACKEND, steer), Effort(cases=5))


@pytest.mark.parametrize(("name", "says"), BAD.items(), ids=list(BAD))
def test_what_cannot_steer_is_said_to(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        steering(name)


def test_what_is_steered_is_one_device_in_this_process() -> None:
    campaign = Campaign(
        backend="cpu",
        communicator="gloo",
        ranks=4,
        profile=Profile.CI,
        families=("ordering",),
        seed=0,
        cases=2,
        steer="helpers.fakes.wheel:steer",
    )
    with campaign.subjects(None) as subjects:
        assert list(subjects) == [Executor.DEVICE]
        assert subjects[Executor.DEVICE].traits.steered
