"""Uneven collectives of the platform on which vLLM is tested, over a group as vLLM has one."""

from datetime import timedelta

import torch.distributed as dist
from helpers.rank_programs.tensor_patterns import pattern, same
from helpers.watchdog import WATCHDOG
from torch.distributed import FileStore  # type: ignore[attr-defined]
from vllm_cpu.uneven_collectives import gather_rows, scatter_sum

from equipoise.hal.communicator import Fabric

WIDTH = 3


def both(fabric: Fabric, where: str, cases: list[list[int]]) -> int:
    """Gather and scatter rows as each list of counts says, and compare; how many were alike."""
    group = fabric.open("test")
    rank, size, timeout = group.rank, group.size, timedelta(seconds=WATCHDOG)
    dist.init_process_group(
        "gloo", store=FileStore(where, size), rank=rank, world_size=size, timeout=timeout
    )
    try:
        return sum(_alike(seed, rank, counts) for seed, counts in enumerate(cases))
    finally:
        dist.destroy_process_group()


def _alike(seed: int, rank: int, counts: list[int]) -> bool:
    parts = [pattern(seed, one, [count, WIDTH], "float32") for one, count in enumerate(counts)]
    gathered = gather_rows(parts[rank], counts)
    full_tensors = [
        pattern(seed, one, [sum(counts), WIDTH], "float32") for one in range(len(counts))
    ]
    contribution = full_tensors[rank].clone()
    scattered = scatter_sum(contribution, counts, rank)
    first = sum(counts[:rank])
    total = sum(full_tensors[1:], start=full_tensors[0])[first : first + counts[rank]]
    return (
        same(gathered, gathered.new_tensor([row for part in parts for row in part.tolist()]))
        and same(scattered, total)
        and same(contribution, full_tensors[rank])
    )
