"""Reads the placement that a run serves unchanged, the same on all ranks."""

from pathlib import Path

import torch

from equipoise.balancer.experts.placement import Layout
from equipoise.balancer.formats import ExpertPlacement, read_placement
from equipoise.demo.model import ModelConfig
from equipoise.demo.settings import RunSettings
from equipoise.hal.communicator import Communicator
from equipoise.hal.errors import FormatError, PlacementError


def read_placement_file(settings: RunSettings, config: ModelConfig) -> Layout | None:
    """None where the run is given none.

    Raises:
        FormatError: the file cannot be read, or is for another model or another number of ranks.
    """
    if settings.placement is None:
        return None
    placement = read_matching(
        settings.placement, settings.stage_ranks, config.layers, config.experts
    )
    return Layout(placement.placement, placement.shares)


def read_matching(path: Path, ranks: int, layers: int, experts: int) -> ExpertPlacement:
    """A placement of just these layers and experts. Raises `FormatError` that names the file."""
    placement = read_placement(path, ranks=ranks)
    if placement.experts != experts:
        problem = f"places {placement.experts} experts, and the model has {experts} a layer"
        raise FormatError(str(path), problem)
    for number in range(layers):
        if number not in placement.layers:
            raise FormatError(str(path), f"has no layer {number}: the model has {layers}")
    if len(placement.layers) != layers:
        problem = f"has layer {placement.layers[-1]}, and the model has {layers}, counted from 0"
        raise FormatError(str(path), problem)
    return placement


def check_same_placement(
    layout: Layout, communicator: Communicator, device: torch.device, deadline: float
) -> None:
    """See that every rank was given the same: each has read a file of its own machine; collective.

    Raises:
        PlacementError: this rank has another one than rank 0.
    """
    digest = list(bytes.fromhex(layout.digest))
    own_digest = torch.tensor(digest, dtype=torch.uint8).to(device)
    gathered = own_digest.new_empty((communicator.size, *own_digest.shape))
    communicator.all_gather(gathered, own_digest).result(deadline)
    gathered = gathered.cpu()
    differ = [
        rank
        for rank, digest_of_rank in enumerate(gathered)
        if not digest_of_rank.equal(gathered[0])
    ]
    if differ:
        raise PlacementError(f"rank {differ[0]} was given another placement than rank 0")
