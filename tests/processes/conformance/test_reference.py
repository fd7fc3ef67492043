"""A property is found again by what it is referred to as."""

import pytest
from processes.conformance import planted

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.reference import refer, resolve
from equipoise.hal.errors import UsageError


def test_properties_of_the_suite_are_found_again() -> None:
    for claim in suite.properties():
        assert resolve(refer(claim)) is claim


def test_a_property_of_another_package_goes_by_its_module_and_name() -> None:
    assert refer(planted.SOUND) == "processes.conformance.planted:SOUND"
    assert resolve(refer(planted.SOUND)) is planted.SOUND


@pytest.mark.parametrize(
    "reference",
    [
        "nowhere:X",
        "processes.conformance.planted:NONE",
        "processes.conformance.planted:VICTIM",
        "ordering/none",
        "none/none",
        "none",
    ],
)
def test_what_is_no_property_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match=reference):
        resolve(reference)


def test_a_property_without_a_name_of_its_own_cannot_be_referred_to() -> None:
    with pytest.raises(UsageError, match="nameless"):
        refer(planted.NAMELESS[0])
