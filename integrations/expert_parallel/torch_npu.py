"""torch_npu's distributed dispatch and combine as an expert-parallel library.

Written against the documentation of `npu_moe_distribute_dispatch` and `npu_moe_distribute_combine`.
What the two series of devices take differs, so each is a library of its own.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise import install_command
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Available, Probe, Unavailable
from equipoise.hal.communicator import Fabric
from equipoise.hal.expert_parallel import (
    ExpertParallelCapabilities,
    ExpertParallelConfig,
    ExpertParallelGroup,
    ReceivedTokens,
)
from equipoise.hal.stream import Stream
from equipoise.integrations.expert_parallel.process_group import ProcessGroup

MODULE = "torch_npu"


@dataclass(frozen=True, eq=False)
class DistributeHandle:
    """What a combine takes of its dispatch, by the names of its arguments; ids are a copy."""

    arguments: dict[str, Tensor | None]


class DistributeGroup(ExpertParallelGroup):
    """One rank of a group without shared experts and without tensor parallelism.

    Args:
        config: of the group.
        accelerator: of all streams.
        ranks: the process group, closed with this group.
        sends_weights: whether weights travel with the tokens, as Atlas A2 needs it.
        module: torch_npu.
    """

    def __init__(
        self,
        config: ExpertParallelConfig,
        accelerator: Accelerator,
        ranks: ProcessGroup,
        sends_weights: bool,
        module: Any,
    ) -> None:
        super().__init__(accelerator, config.deadline)
        self._module = module
        self._local_experts = config.experts // ranks.size
        self._sends_weights = sends_weights
        self._ranks = ranks
        self._domain = {
            "group_ep": _communicator_name(ranks, accelerator.device),
            "ep_world_size": ranks.size,
            "ep_rank_id": ranks.rank,
            "moe_expert_num": config.experts,
            "shared_expert_rank_num": 0,
            "global_bs": config.max_tokens * ranks.size,
        }

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Dispatch without quantisation; rows are grouped by local expert."""
        with self.ordered(stream):
            ids, kept_weights = expert_ids.clone(), weights.clone()
            scales = {"expert_scales": kept_weights} if self._sends_weights else {}
            rows, _, indices, counts, sent, tp_sent, expanded = (
                self._module.npu_moe_distribute_dispatch(
                    x=tokens, expert_ids=ids, quant_mode=0, **scales, **self._domain
                )
            )
            ends = counts.cumsum(0)
            places = torch.arange(rows.shape[0], device=rows.device)
            experts = (places[:, None] >= ends[None, :]).sum(1)
            experts = torch.where(experts == self._local_experts, -1, experts)
        arguments = {
            "expert_ids": ids,
            "expand_idx": indices,
            "ep_send_counts": sent,
            "tp_send_counts": tp_sent,
            "expert_scales": kept_weights,
        }
        if self._sends_weights:
            arguments["expand_scales"] = expanded
        return ReceivedTokens(rows, experts, counts, DistributeHandle(arguments))

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Combine; the library sums by weight."""
        assert isinstance(handle, DistributeHandle)
        with self.ordered(stream):
            combined: Tensor = self._module.npu_moe_distribute_combine(
                expand_x=outputs, **handle.arguments, **self._domain
            )
        return combined

    def close(self) -> None:
        """End the process group; closing again is no error."""
        self._ranks.close()


def _communicator_name(ranks: ProcessGroup, device: torch.device) -> str:
    """The name by which the operators know a process group of HCCL; that of any other one else."""
    backend: Any = ranks.group._get_backend(device)
    if device.type != "npu":
        return str(ranks.group.group_name)
    return str(backend.get_hccl_comm_name(ranks.rank))


@dataclass(frozen=True)
class DistributeLibrary:
    """The operators on one series of devices.

    Attributes:
        name: by which users select it.
        capabilities: the limits that the documentation names, and what it promises.
        sends_weights: whether weights travel with the tokens.
        module: where the operators are.
    """

    name: str
    capabilities: ExpertParallelCapabilities
    sends_weights: bool
    module: str = MODULE

    def probe(self) -> Probe:
        """Whether torch_npu is installed."""
        if importlib.util.find_spec(self.module) is None:
            return Unavailable(f"torch_npu is not installed: {install_command('ascend')}")
        return Available("npu_moe_distribute_dispatch and npu_moe_distribute_combine")

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> DistributeGroup:
        """Open a group over a process group of its own. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        module = importlib.import_module(self.module)
        return DistributeGroup(config, accelerator, ranks, self.sends_weights, module)


ATLAS_A2 = DistributeLibrary(
    "torch-npu-a2",
    ExpertParallelCapabilities(
        dtypes=(torch.bfloat16, torch.float16),
        hidden_sizes=(32, 96, 7168),
        top_ks=tuple(range(1, 17)),
        group_sizes=(16, 32, 64),
        counts=True,
    ),
    sends_weights=True,
)
ATLAS_A3 = DistributeLibrary(
    "torch-npu-a3",
    ExpertParallelCapabilities(
        dtypes=(torch.bfloat16, torch.float16),
        hidden_sizes=(7168,),
        top_ks=tuple(range(1, 9)),
        group_sizes=(8, 16, 32, 64, 128, 144, 256, 288),
        counts=True,
    ),
    sends_weights=False,
)
