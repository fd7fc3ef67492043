"""Several things are closed, whatever becomes of one of them."""

import logging

import pytest

from equipoise.balancer.experts.closing import close_all, close_quietly
from equipoise.hal.errors import EngineError


class Part:
    def __init__(self, closed_names: list[str], name: str, is_failing: bool = False) -> None:
        self._closed_names, self._name, self._is_failing = closed_names, name, is_failing

    def close(self) -> None:
        self._closed_names.append(self._name)
        if self._is_failing:
            raise EngineError(f"{self._name} does not end")


def three_parts(closed_names: list[str]) -> list[Part]:
    return [
        Part(closed_names, "first"),
        Part(closed_names, "middle", is_failing=True),
        Part(closed_names, "last"),
    ]


def test_close_all_closes_in_reverse_order_and_raises_error() -> None:
    closed_names: list[str] = []
    with pytest.raises(EngineError, match="middle does not end"):
        close_all(three_parts(closed_names))
    assert closed_names == ["last", "middle", "first"]


def test_close_failure_is_logged_when_another_error_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed_names: list[str] = []
    with caplog.at_level(logging.WARNING):
        close_quietly(three_parts(closed_names))
    assert closed_names == ["last", "middle", "first"]
    assert "middle does not end" in caplog.text
