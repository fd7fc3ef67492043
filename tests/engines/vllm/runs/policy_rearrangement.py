"""Two ranks whose expert weights vLLM's own functions rearrange as our policy says.

    python -m engines.vllm.runs.policy_rearrangement FILE

FILE is where the ranks meet. Each row of weights says which expert of which layer it is. Prints one
line of JSON: by rank and window, what was received, what was predicted, and whether all rows are
right. The ranks are forked from a process that has imported vLLM.
"""

import json
import sys
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from helpers.harnesses.vllm_policy import first_map, popular, window
from torch import Tensor
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

from equipoise.balancer.experts.placement import ExpertShape
from equipoise.integrations.vllm.counters import COUNTERS
from equipoise.integrations.vllm.eplb.policy import policy_class
from equipoise.integrations.vllm.settings import EplbPolicySettings

SHAPE = ExpertShape(layers=3, experts=16, slots=20, ranks=2)
WIDTHS = 5, 3
WINDOWS = 4
BYTES = 8 * sum(WIDTHS)
"""Of an expert: float64 in tensors of these widths."""


class Counting(TorchDistNcclEplbCommunicator):
    """Point to point on any group; counts what it receives."""

    received = 0

    def add_recv(self, tensors: list[Tensor], src_rank: int, expert_id: int) -> None:
        self.received += sum(tensor.nbytes for tensor in tensors)
        super().add_recv(tensors, src_rank, expert_id)


def rows(placement: Tensor, rank: int) -> list[list[Tensor]]:
    """Weights of a rank, by layer and tensor: (slots of a rank, width)."""
    mine = placement.reshape(SHAPE.layers, SHAPE.ranks, -1)[:, rank].double()
    return [
        [(1000 * layer + row)[:, None] * torch.linspace(1, 2, width).double() for width in WIDTHS]
        for layer, row in enumerate(mine)
    ]


def is_committed(model: Any, new: Tensor) -> bool:
    """Whether the engine's own commit leaves every expert its slots."""
    eplb_state._commit_eplb_maps(model, new)
    copies = model.logical_replica_count.sum(dim=1)
    return bool((model.logical_replica_count > 0).all() and (copies == SHAPE.slots).all())


def model_state(placement: Tensor) -> Any:
    """The model state that a commit writes to."""
    return SimpleNamespace(
        physical_to_logical_map=placement.clone(),
        logical_to_physical_map=torch.full((SHAPE.layers, SHAPE.experts, 8), -1),
        logical_replica_count=torch.zeros(SHAPE.layers, SHAPE.experts, dtype=torch.int64),
    )


LayerResults = list[list[int]]
"""By window."""


def move(rank: int, meeting: str) -> LayerResults:
    """Four windows: the first moves much, the second nothing, and then the traffic is another."""
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{meeting}", limit, world_size=2, rank=rank)
    policy = policy_class(EplbPolicySettings())
    old = torch.from_numpy(first_map(SHAPE)).long()
    weights, model = rows(old, rank), model_state(old)
    layer_results: LayerResults = []
    for number in range(WINDOWS):
        load = torch.from_numpy(window(popular(number // 2, SHAPE.layers, SHAPE.experts), number))
        before = COUNTERS.read()["eplb_policy_moved_slots"]
        new = policy.rebalance_experts(load, SHAPE.slots, 1, 1, SHAPE.ranks, old)
        carrier = Counting(dist.group.WORLD)
        buffer = [torch.empty_like(each) for each in weights[0]]
        rearrange_expert_weights_inplace(old, new, weights, buffer, dist.group.WORLD, carrier)
        right = all(
            torch.equal(is_now, expected_weight)
            for layer, expected in zip(weights, rows(new, rank), strict=True)
            for is_now, expected_weight in zip(layer, expected, strict=True)
        )
        moves = COUNTERS.read()["eplb_policy_moved_slots"] - before
        layer_results.append([carrier.received, moves * BYTES, right and is_committed(model, new)])
        old = new
    dist.destroy_process_group()
    return layer_results


def main(meeting: str) -> None:
    """The program."""
    with get_context("fork").Pool(SHAPE.ranks) as ranks:
        results_by_rank = ranks.starmap(
            move, [(rank, meeting) for rank in range(SHAPE.ranks)], chunksize=1
        )
    print(json.dumps(results_by_rank), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
