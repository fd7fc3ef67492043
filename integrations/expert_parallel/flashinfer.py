"""FlashInfer's `moe_ep` as an expert-parallel library: its communications over NVLink.

Written against `create_communication` and the contract of `MoEEpCommunication` in version 0.7.2
(`flashinfer/moe_ep/core/comm/communication.py`). What `moe_ep` makes of NCCL-EP and NIXL-EP has
another interface there; those libraries have adapters of their own.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Available, Probe, Unavailable
from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import Unsupported
from equipoise.hal.expert_parallel import (
    ExpertParallelCapabilities,
    ExpertParallelConfig,
    ExpertParallelGroup,
    ReceivedTokens,
)
from equipoise.hal.stream import Stream
from equipoise.integrations.expert_parallel.local_choices import LocalChoices
from equipoise.integrations.expert_parallel.process_group import ProcessGroup

MODULE = "flashinfer"
ONE_SIDED_TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""Choices per token that the one-sided kernels are compiled for."""
EXPERTS_MULTIPLE = 4
"""The two-sided kernels take a multiple of so many experts."""
MAX_RANKS = 64


class FlashInferGroup(ExpertParallelGroup):
    """One rank of a communication.

    It sends a token once to each rank, with all its choices, and adds what ranks return without
    weights. As its contract asks of callers, this multiplies by weight and adds up on the rank of
    the experts, in float32.

    Args:
        config: of the group.
        accelerator: of all streams.
        ranks: the process group, closed with this group.
        communication: FlashInfer's.
        rank_mask: from ranks and their number to the mask that the communication takes; None where
            it takes none.
    """

    def __init__(
        self,
        config: ExpertParallelConfig,
        accelerator: Accelerator,
        ranks: ProcessGroup,
        communication: Any,
        rank_mask: Callable[[Sequence[int], int], Tensor] | None = None,
    ) -> None:
        super().__init__(accelerator, config.deadline)
        self._local_experts = config.experts // ranks.size
        self._ranks = ranks
        self._communication = communication
        self._rank_mask = rank_mask
        self._mask: dict[str, Tensor] = {}
        self._closed = False

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Dispatch without quantisation, and list a row for each choice of a received token."""
        with self.ordered(stream):
            received = self._communication.dispatch(tokens, expert_ids, weights, **self._mask)
            local = received.topk_ids - self._ranks.rank * self._local_experts
            here = (local >= 0) & (local < self._local_experts)
            choices = LocalChoices(torch.where(here, local, -1), received.topk_weights)
            rows = choices.rows(received.hidden_states)
        return ReceivedTokens(rows, choices.experts.view(-1), None, choices)

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Add up by weight what belongs to one received token, and combine."""
        assert isinstance(handle, LocalChoices)
        with self.ordered(stream):
            combined: Tensor = self._communication.combine(handle.sum(outputs), **self._mask)
        return combined

    def set_active(self, ranks: Sequence[int]) -> None:
        """Mask every rank that is not in `ranks`. Raises `Unsupported` where none can be masked."""
        if self._rank_mask is None:
            raise Unsupported("this communication cannot mask ranks")
        self._mask = {"active_rank_mask": self._rank_mask(ranks, self._ranks.size)}

    def close(self) -> None:
        """Release the communication and the process group, once."""
        if not self._closed:
            self._closed = True
            self._communication.destroy()
            self._ranks.close()


@dataclass(frozen=True)
class FlashInferLibrary:
    """One of FlashInfer's communications, without quantisation.

    Attributes:
        name: by which users select it.
        configuration: class of `flashinfer.moe_ep` that selects the communication.
        capabilities: what the docstrings say; no more.
        module: FlashInfer.
    """

    name: str
    configuration: str
    capabilities: ExpertParallelCapabilities
    module: str = MODULE

    def probe(self) -> Probe:
        """Whether FlashInfer is installed, and a GPU is there."""
        if importlib.util.find_spec(self.module) is None:
            return Unavailable("flashinfer is not installed: pip install flashinfer-python")
        if not torch.cuda.is_available():
            return Unavailable("no CUDA device")
        return Available(f"flashinfer.moe_ep with {self.configuration}")

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> FlashInferGroup:
        """Open a communication over a process group of its own. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        moe_ep = importlib.import_module(f"{self.module}.moe_ep")
        masks = self.capabilities.masks
        communication = moe_ep.create_communication(
            moe_ep.BootstrapConfig(
                world_size=ranks.size,
                rank=ranks.rank,
                device=accelerator.device.index,
                process_group=ranks.group,
            ),
            moe_ep.MoEEpCommParams(
                num_experts=config.experts,
                top_k=config.top_k,
                max_tokens_per_rank=config.max_tokens,
                hidden_size=config.hidden,
                dtype=config.dtype,
            ),
            getattr(moe_ep, self.configuration)(**({"enable_rank_mask": True} if masks else {})),
        )
        comm = importlib.import_module(f"{self.module}.comm")
        rank_mask = comm.moe_a2a_active_rank_mask if masks else None
        return FlashInferGroup(config, accelerator, ranks, communication, rank_mask)


ONE_SIDED = FlashInferLibrary(
    "flashinfer-one-sided",
    "NVLinkOneSidedConfig",
    ExpertParallelCapabilities(
        top_ks=ONE_SIDED_TOP_KS,
        group_sizes=tuple(range(1, MAX_RANKS + 1)),
        masks=True,
        graph_capture=True,
    ),
)
TWO_SIDED = FlashInferLibrary(
    "flashinfer-two-sided",
    "NVLinkTwoSidedConfig",
    ExpertParallelCapabilities(
        experts_per_rank=(EXPERTS_MULTIPLE, 4 * EXPERTS_MULTIPLE),
        group_sizes=tuple(range(1, MAX_RANKS + 1)),
        graph_capture=True,
    ),
)
