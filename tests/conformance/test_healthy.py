"""No false alarm: every healthy backend is accepted, whatever the draws start from."""

import pytest
from helpers.tiers import DEEP

from equipoise.backends.virtual import BACKEND
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.search import Effort, Held, search
from equipoise.hal.conformance.virtual import ControlledSubject

SEEDS = range(20) if DEEP else range(2)
CASES = 400 if DEEP else 60


SUBJECT = ControlledSubject(BACKEND)
PLAYED = [claim for claim in suite.properties() if claim.where(SUBJECT.traits)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("claim", PLAYED, ids=lambda claim: claim.name)
def test_a_property_holds_on_the_healthy_virtual_backend(claim: Property, seed: int) -> None:
    found = search(claim, SUBJECT, Effort(cases=CASES, seed=seed))
    assert isinstance(found, Held), found
