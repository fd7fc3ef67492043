"""Several things are closed, whatever becomes of one of them."""

import logging

import pytest

from equipoise.balancer.experts.closing import close_all, close_quietly
from equipoise.hal.errors import EngineError


class Thing:
    def __init__(self, ended: list[str], name: str, fails: bool = False) -> None:
        self._ended, self._name, self._fails = ended, name, fails

    def close(self) -> None:
        self._ended.append(self._name)
        if self._fails:
            raise EngineError(f"{self._name} does not end")


def things(ended: list[str]) -> list[Thing]:
    return [Thing(ended, "first"), Thing(ended, "middle", fails=True), Thing(ended, "last")]


def test_close_all_closes_in_reverse_order_and_raises_error() -> None:
    ended: list[str] = []
    with pytest.raises(EngineError, match="middle does not end"):
        close_all(things(ended))
    assert ended == ["last", "middle", "first"]


def test_close_failure_is_logged_when_another_error_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []
    with caplog.at_level(logging.WARNING):
        close_quietly(things(ended))
    assert ended == ["last", "middle", "first"]
    assert "middle does not end" in caplog.text
