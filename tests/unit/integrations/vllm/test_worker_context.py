"""Which accelerator and communicator a worker of vLLM gets."""

from typing import Any

import pytest
import torch

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.worker_context import open_worker_context

GROUP: Any = None  # no rank is connected before the device and the communicator are checked


@pytest.mark.parametrize(
    ("device", "communicator", "message"),
    [
        ("cpu", "nccl", "nccl is not for a device of type cpu: gloo"),
        ("cuda", "hccl", "hccl is not for a device of type cuda: nccl or gloo"),
        ("meta", None, "no backend for a device of type 'meta': cpu, cuda, npu"),
    ],
)
def test_site_refuses_communicator_of_other_device(
    device: str, communicator: str | None, message: str
) -> None:
    with pytest.raises(IntegrationError, match=message):
        open_worker_context(GROUP, torch.device(device), 1.0, communicator)
