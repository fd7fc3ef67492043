"""A placement that every rank has read from a file of its own."""

from typing import Any

import numpy as np
import torch
from helpers.rank_programs.call_outcome import outcome
from helpers.watchdog import WATCHDOG

from equipoise.balancer.experts.placement import Layout, even_shares
from equipoise.demo.placement_file import check_same_placement
from equipoise.hal.communicator import Fabric


def compare(fabric: Fabric, odd: int) -> Any:
    """Rank `odd` was given two experts the other way round; none was where it is -1."""
    placement = np.arange(8, dtype=np.int32).reshape(1, 8)
    if fabric.control.rank == odd:
        placement[0, :2] = placement[0, 1::-1]
    layout = Layout(placement, even_shares(placement, 8))
    communicator = fabric.open("placement")
    return outcome(
        lambda: check_same_placement(layout, communicator, torch.device("cpu"), WATCHDOG)
    )
