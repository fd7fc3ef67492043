"""Devices whose schedule can be chosen receive it; it is varied and shrunk."""

from collections.abc import Callable

import pytest
from helpers.fakes import schedule_recorder as wheel
from hypothesis import strategies as st

from equipoise.backends.cpu import BACKEND
from equipoise.hal.conformance.context import Play, RankContext, require
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.executors.steering import load_steer
from equipoise.hal.conformance.fixtures.strategies import MAX_CHOICES
from equipoise.hal.conformance.profile import Executor, Profile
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.runner import ConformanceRun
from equipoise.hal.conformance.search import PropertyHeld, PropertyViolated, SearchSettings, search
from equipoise.hal.errors import UsageError
from equipoise.hal.stream import Role

BAD = {
    "steer": "is not PACKAGE:OBJECT",
    "no.such.module:steer": "does not import: ModuleNotFoundError",
    "json:no_such_name": "does not import: AttributeError",
    "math:pi": "cannot be called: 3.14",
}


def _racy(ctx: RankContext, _: Program) -> Play:
    """Goes wrong when the latest schedule has a choice above 100 in it."""
    yield from ()
    ctx.inject_delay(ctx.accelerator.stream(Role.COMPUTE))
    require("O1", max(wheel.TOLD[-1], default=0) <= 100, "out of order")


def _sound(ctx: RankContext, _: Program) -> Play:
    yield from ()


def _property(play: Callable[[RankContext, Program], Play]) -> Property:
    return Property(
        name="steered",
        family="ordering",
        clauses=("O1",),
        claim="In order.",
        programs=lambda _: st.just(make_program([Step("go")])),
        play=play,
    )


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    wheel.TOLD.clear()


def test_steered_search_finds_and_shrinks_breaking_schedule() -> None:
    verdict = search(
        _property(_racy), DeviceSubject(BACKEND, wheel.steer), SearchSettings(cases=200)
    )
    assert isinstance(verdict, PropertyViolated)
    assert verdict.case.schedule == b"\x65"


def test_steered_search_gives_each_case_its_own_schedule() -> None:
    verdict = search(
        _property(_sound), DeviceSubject(BACKEND, wheel.steer), SearchSettings(cases=60)
    )
    assert verdict == PropertyHeld(60)
    assert len(wheel.TOLD) == 60
    assert len(set(wheel.TOLD)) > 30
    assert max(map(len, wheel.TOLD)) > MAX_CHOICES


def test_steering_failure_is_a_usage_error() -> None:
    steer = load_steer("helpers.fakes.schedule_recorder:into_nothing")
    with pytest.raises(UsageError, match="cannot steer: OSError: the driver is not there"):
        search(_property(_sound), DeviceSubject(BACKEND, steer), SearchSettings(cases=5))


@pytest.mark.parametrize(("name", "says"), BAD.items(), ids=list(BAD))
def test_steering_refuses_invalid_name(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_steer(name)


def test_steered_campaign_plays_one_local_device() -> None:
    campaign = ConformanceRun(
        backend="cpu",
        communicator="gloo",
        ranks=4,
        profile=Profile.CI,
        families=("ordering",),
        seed=0,
        cases=2,
        steer="helpers.fakes.schedule_recorder:steer",
    )
    with campaign.subjects(None) as subjects:
        assert list(subjects) == [Executor.DEVICE]
        assert subjects[Executor.DEVICE].traits.steered
