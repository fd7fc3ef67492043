"""The first device, opened for one test."""

from collections.abc import Iterator

import pytest

from equipoise.backends.ascend import BACKEND
from equipoise.backends.ascend.accelerator import AscendAccelerator


@pytest.fixture
def npu() -> Iterator[AscendAccelerator]:
    accelerator = BACKEND.open(0)
    yield accelerator
    accelerator.close()
