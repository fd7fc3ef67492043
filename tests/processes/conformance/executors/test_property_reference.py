"""A property's reference resolves to the same property."""

import pytest
from processes.conformance import planted_properties as planted

from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.property_reference import (
    property_reference,
    resolve_property,
)
from equipoise.hal.errors import UsageError


def test_suite_properties_resolve_from_their_reference() -> None:
    for claim in suite.properties():
        assert resolve_property(property_reference(claim)) is claim


def test_foreign_property_reference_is_module_and_name() -> None:
    assert property_reference(planted.SOUND) == "processes.conformance.planted_properties:SOUND"
    assert resolve_property(property_reference(planted.SOUND)) is planted.SOUND


@pytest.mark.parametrize(
    "reference",
    [
        "nowhere:X",
        "processes.conformance.planted_properties:NONE",
        "processes.conformance.planted_properties:VICTIM",
        "ordering/none",
        "none/none",
        "none",
    ],
)
def test_property_reference_to_no_property_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match=reference):
        resolve_property(reference)


def test_property_reference_requires_module_name() -> None:
    with pytest.raises(UsageError, match="nameless"):
        property_reference(planted.NAMELESS[0])
