"""Clause B2: what a backend declares about itself."""

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from equipoise.backends.cpu import BACKEND, GLOO
from equipoise.hal.capabilities import Capabilities, CommunicatorCapabilities, SlotFormat

SILENT = (Capabilities(), CommunicatorCapabilities())


@pytest.mark.parametrize("defaults", SILENT, ids=lambda c: type(c).__name__)
def test_default_capabilities_promise_nothing(defaults: object) -> None:
    answers = [getattr(defaults, field.name) for field in fields(defaults)]  # type: ignore[arg-type]
    assert not any(answer for answer in answers if isinstance(answer, bool))


def test_default_capabilities_move_bytes_and_sum_integers() -> None:
    assert CommunicatorCapabilities().dtypes == {torch.uint8, torch.int32, torch.int64}
    assert CommunicatorCapabilities().reductions == {torch.int32, torch.int64}
    assert Capabilities().slot_formats == {SlotFormat.STRIDED}
    assert Capabilities().streams == 1


@pytest.mark.parametrize(
    "declaration", [BACKEND.capabilities, GLOO.capabilities], ids=["cpu", "gloo"]
)
def test_capabilities_are_frozen(declaration: object) -> None:
    with pytest.raises(FrozenInstanceError):
        declaration.streams = 0  # type: ignore[attr-defined]


def test_reductions_are_subset_of_dtypes() -> None:
    for capabilities in (GLOO.capabilities, CommunicatorCapabilities()):
        assert capabilities.reductions <= capabilities.dtypes
