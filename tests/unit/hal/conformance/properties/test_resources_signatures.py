"""Signatures are compared with a protocol name by name."""

from typing import Protocol

import pytest

from equipoise.hal.conformance.properties.resources_signatures import signature_differences

DUE = "(angle, *, slowly=False)"


class Door(Protocol):
    """A protocol."""

    @property
    def width(self) -> int:
        """Centimetres."""
        ...

    def open(self, angle: float, *, slowly: bool = False) -> None:
        """Open it."""
        ...


class Right:
    width = 90

    def open(self, angle: float, *, slowly: bool = False) -> None:
        pass


class Missing:
    width = 90


class Renamed:
    width = 90

    def open(self, degrees: float, *, slowly: bool = False) -> None:
        pass


class OtherDefault:
    width = 90

    def open(self, angle: float, *, slowly: bool = True) -> None:
        pass


class OtherKind:
    width = 90

    def open(self, angle: float, slowly: bool = False) -> None:
        pass


class Called(Right):
    def width(self) -> int:  # type: ignore[override]
        return 90


def test_matching_object_has_no_signature_differences() -> None:
    assert signature_differences(Door, Right()) == []
    assert signature_differences(Door, Right) == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Missing, "has no open"),
        (Renamed, f"open takes (degrees, *, slowly=False), not {DUE}"),
        (OtherDefault, f"open takes (angle, *, slowly=True), not {DUE}"),
        (OtherKind, f"open takes (angle, slowly=False), not {DUE}"),
        (Called, "width is a method, not an attribute"),
    ],
)
def test_signature_difference_is_named(kind: type, line: str) -> None:
    (difference,) = signature_differences(Door, kind())
    assert difference == f"{kind.__name__} for Door: {line}"
