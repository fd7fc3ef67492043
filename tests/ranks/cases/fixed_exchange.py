"""The exchange of fixed capacity among processes, beside a dense reference."""

from typing import Any

import torch
from exchanging import case as cases
from exchanging.play import wire
from exchanging.script import Script
from ranks.cases.patterns import SOON

from equipoise.backends.cpu import BACKEND
from equipoise.hal.communicator import Fabric
from equipoise.hal.stream import Role
from equipoise.pipeline.expert_exchange.fixed import FixedExchange
from equipoise.pipeline.expert_exchange.torch_kernels import TorchKernels, device_memory


def round_trips(fabric: Fabric, given: dict[str, Any], where: str) -> dict[str, Any]:
    """Play a case here, if this rank takes part in it.

    Args:
        fabric: of the processes.
        given: the case.
        where: "host" calls from this thread, "stream" from a program of the compute stream.
    """
    case = cases.case(given)
    group = fabric.open("experts")
    if group.rank not in case.ranks:
        return {"wrong": {}, "verdicts": []}
    accelerator = BACKEND.open(0)
    form = case.form()
    kernels = TorchKernels(
        form, wire(case, group, accelerator, SOON), device_memory(accelerator.device)
    )
    exchange = FixedExchange(form, kernels, accelerator)
    script = Script(
        case, group.rank, exchange, accelerator, lambda n: torch.empty(n, dtype=torch.uint8)
    )
    if where == "host":
        _run(script)
    else:
        compute = accelerator.stream(Role.COMPUTE)
        compute.launch(lambda: _run(script))
        compute.synchronize(2 * SOON)
    accelerator.synchronize(SOON)
    accelerator.close()
    return {"wrong": script.told.wrong, "verdicts": script.told.verdicts}


def _run(script: Script) -> None:
    for _ in script.play():
        """Nothing chooses who moves next."""
