"""Balancers that are opened, served with and closed, over and over, on ranks of different speed."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from helpers.processes import resource_counts as census
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.balancer.experts.balancer import (
    NO_REBALANCING,
    ExpertBalancer,
    StagedFromPeers,
    open_balancer,
)
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Fabric
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role

SHAPE = ExpertShape(layers=2, experts=4, slots=6, ranks=2)
CONFIG = BalancerConfig(
    name="",
    shares=ShareMode.STATIC,
    window_size=2,
    step_interval=4,
    sub_window=2,
    max_stalled_steps=1000,
    timeout=20.0,
)
IDS = torch.tensor([[0], [1], [2], [3], [0], [0]], dtype=torch.int32)
STEPS = 7
LATE = 0.1
"""Seconds by which the stream of the second rank is behind when both close."""


def over_and_over(fabric: Fabric, times: int, shares: str, static: bool) -> Any:
    """Census behind the first few balancers, and behind `times` more."""
    accelerator = registry.accelerator("cpu").open(0)
    routed = [_life(fabric, accelerator, f"warm{n}", shares, static) for n in range(2)]
    before = census.process()
    routed += [_life(fabric, accelerator, f"m{n}", shares, static) for n in range(times)]
    after = census.process()
    accelerator.close()
    return {"before": before, "after": after, "routed": routed}


def leave_a_receive(fabric: Fabric, seconds: float) -> Any:
    """Close communicators with an operation in flight, which ends at its deadline."""
    before = census.process()
    for number in range(4):
        group = fabric.open(f"left{number}")
        if group.rank == 0:
            group.irecv(torch.zeros(5), 1) if number % 2 else group.barrier()
            fabric.control.cast(f"left{number} is in flight", b"")
        else:  # else it might close before there is anything in flight
            fabric.control.collect(f"left{number} is in flight", WATCHDOG, [0])
        group.close()
    expiry = time.monotonic() + seconds
    while time.monotonic() < expiry and census.process()["threads"] > before["threads"]:
        time.sleep(0.05)
    return {"before": before, "after": census.process()}


def _life(
    fabric: Fabric, accelerator: Accelerator, label: str, shares: str, static: bool
) -> list[int]:
    """Route on the compute stream, close while it still has work; rows by slot of the last step."""
    balancer = _open_balancer(fabric, accelerator, label, ShareMode(shares), static)
    compute = accelerator.stream(Role.COMPUTE)
    slots_by_layer: list[Tensor] = []
    for step in range(STEPS):
        with balancer.step(step):
            if fabric.control.rank == 1 and step == STEPS - 1:
                compute.launch(lambda: time.sleep(LATE))
            for layer in range(SHAPE.layers):
                # As a model does it: the router's own operations are issued by the stream.
                compute.launch(partial(_route, balancer, layer, step, slots_by_layer))
    balancer.close()
    balancer.close()
    return torch.bincount(slots_by_layer[-1].view(-1), minlength=SHAPE.slots).tolist()


def _route(balancer: ExpertBalancer, layer: int, step: int, slots_by_layer: list[Tensor]) -> None:
    slots_by_layer.append(balancer.router.route(layer, step, IDS))


def _open_balancer(
    fabric: Fabric, accelerator: Accelerator, label: str, shares: ShareMode, static: bool
) -> ExpertBalancer:
    rows = torch.zeros(SHAPE.layers * SHAPE.slots_per_rank, 4)
    slots = SlotLayout(tuple((Segment("weight", row),) for row in rows), staging=6)
    store = accelerator.slot_store(slots)
    layout = Layout(initial_placement(SHAPE), even_shares(initial_placement(SHAPE), SHAPE.experts))
    config = replace(CONFIG, name=label, shares=shares)
    path = NO_REBALANCING if static else StagedFromPeers()
    return open_balancer(accelerator, fabric, store, SHAPE, layout, config, path)
