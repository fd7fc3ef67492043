"""No false alarm: the healthy virtual backend is accepted from every seed.

Every commit plays one seed: `test_backends.py`.
"""

import pytest

from equipoise.backends.virtual import BACKEND
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.controlled import ControlledSubject
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.search import PropertyHeld, SearchSettings, search

pytestmark = pytest.mark.deep
SEEDS, CASES = range(20), 400
SUBJECT = ControlledSubject(BACKEND)
APPLICABLE = [claim for claim in suite.properties() if claim.applies_to(SUBJECT.traits)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prop", APPLICABLE, ids=lambda prop: prop.name)
def test_property_holds_on_healthy_virtual_backend(prop: Property, seed: int) -> None:
    verdict = search(prop, SUBJECT, SearchSettings(cases=CASES, seed=seed))
    assert isinstance(verdict, PropertyHeld), verdict
