"""Clause B2: what a backend says about itself."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from equipoise.backends.cpu import BACKEND, GLOO
from equipoise.hal.capabilities import Capabilities, CommunicatorCapabilities, SlotFormat

SILENT = (Capabilities(), CommunicatorCapabilities())


@pytest.mark.parametrize("silent", SILENT, ids=lambda c: type(c).__name__)
def test_a_backend_that_says_nothing_promises_nothing(silent: object) -> None:
    answers = [getattr(silent, field.name) for field in fields(silent)]  # type: ignore[arg-type]
    assert not any(answer for answer in answers if isinstance(answer, bool))


def test_by_default_bytes_and_integers_travel_and_only_integers_are_summed() -> None:
    assert CommunicatorCapabilities().dtypes == {torch.uint8, torch.int32, torch.int64}
    assert CommunicatorCapabilities().reductions == {torch.int32, torch.int64}
    assert Capabilities().slot_formats == {SlotFormat.STRIDED}
    assert Capabilities().streams == 1


@pytest.mark.parametrize("told", [BACKEND.capabilities, GLOO.capabilities], ids=["cpu", "gloo"])
def test_capabilities_cannot_be_changed(told: object) -> None:
    with pytest.raises(FrozenInstanceError):
        told.streams = 0  # type: ignore[attr-defined]


def test_what_can_be_summed_can_also_travel() -> None:
    for told in (GLOO.capabilities, CommunicatorCapabilities()):
        assert told.reductions <= told.dtypes
