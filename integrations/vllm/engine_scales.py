"""Scales that are taken for one and the same by all experts, looked at before any expert moves."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.hal.errors import IntegrationError

ALIKE = ("w13_input_scale", "w2_input_scale")
"""Not on vLLM's list of what moves: it repeats one value, in most formats."""


def scales(model: Any) -> list[tuple[str, Tensor]]:
    """What has to be alike, by name; the same names on every rank."""
    return [
        (f"layers.{number}.{name}", tensor)
        for number, layer in enumerate(model.moe_layers)
        for name in ALIKE
        if isinstance(tensor := getattr(layer.routed_experts, name, None), Tensor)
        and tensor.numel()
    ]


def check_scales(found: Sequence[tuple[str, Tensor]], group: Any) -> None:
    """Whether each holds one value, on all ranks; collective, over the host.

    Some kernels of NVFP4 keep a value for each expert, and fold it into what does move: an expert
    that moved would be scaled by another's.

    Args:
        found: see `scales`.
        group: of the expert-parallel ranks, for the host's tensors.

    Raises:
        IntegrationError: names those that do not, on every rank.
    """
    if not found:
        return
    values = [tensor.detach().double().flatten().cpu() for _, tensor in found]
    ends = torch.stack([torch.stack([value.max(), -value.min()]) for value in values])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    wrong = [name for (name, _), (high, low) in zip(found, ends, strict=True) if high != -low]
    if wrong:
        raise IntegrationError(f"scales differ among experts, and would not move: {wrong}")
