"""Collectives over gloo, with those of unequal sizes that the CPU build lacks."""

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from vllm_cpu.uneven_collectives import gather_rows, scatter_sum


class HostCommunicator(CpuCommunicator):
    """`CpuCommunicator` that always speaks through `torch.distributed`."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        """Never the shared memory of the CPU build.

        The holes: its ranks spin while they wait, which starves other ranks where cores are few;
        its segments stay in the system when a process is killed; and its sends between stages
        block, so that nothing would wait for what another stage sends. Without it vLLM takes its
        own path for every other device, `isend` and `irecv`.
        """
        return False

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        """Rows of all ranks, in their order; of each tensor, where there are several.

        The hole: `DeviceCommunicatorBase.all_gatherv` raises `NotImplementedError`, so that no
        data-parallel mixture of experts runs (vLLM issue 57837).
        """
        if isinstance(input_, list):
            return [self.all_gatherv(tensor, dim, sizes) for tensor in input_]
        counts = [input_.shape[0]] * self.world_size if sizes is None else list(sizes)
        if dim != 0 or counts[self.rank_in_group] != input_.shape[0]:
            raise ValueError(f"{tuple(input_.shape)} is not rank {self.rank_in_group} of {counts}")
        return gather_rows(input_, counts, self.device_group)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """The sum over ranks of this rank's rows, (sizes[rank], ...).

        The hole: `DeviceCommunicatorBase.reduce_scatterv` raises `NotImplementedError` (vLLM issue
        57837).
        """
        equal = [input_.shape[0] // self.world_size] * self.world_size
        counts = equal if sizes is None else list(sizes)
        if dim != 0 or sum(counts) != input_.shape[0]:
            raise ValueError(f"{tuple(input_.shape)} does not scatter as {counts} along {dim}")
        return scatter_sum(input_, counts, self.rank_in_group, self.device_group)
