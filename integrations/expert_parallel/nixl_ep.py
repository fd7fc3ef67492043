"""NIXL-EP's `Buffer` as an expert-parallel library.

Written against `examples/device/ep/nixl_ep/buffer.py` of NIXL.
"""

import importlib.util
from dataclasses import dataclass

import torch

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.capabilities import Available, Probe, Unavailable
from equipoise.hal.communicator import Fabric
from equipoise.hal.expert_parallel import ExpertParallelCapabilities, ExpertParallelConfig
from equipoise.integrations.expert_parallel.low_latency import (
    IN_FLIGHT,
    LowLatencyCalls,
    LowLatencyGroup,
)
from equipoise.integrations.expert_parallel.process_group import ProcessGroup

MODULE = "nixl_ep"
HIDDEN_SIZES = (2560, 5120, 7168)
"""Row lengths that its kernels are compiled for."""


@dataclass(frozen=True)
class NixlLibrary:
    """NIXL-EP, without FP8."""

    name: str = "nixl-ep"
    module: str = MODULE

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """What its docstrings say; no more."""
        return ExpertParallelCapabilities(
            hidden_sizes=HIDDEN_SIZES, padding=True, counts=True, in_flight=IN_FLIGHT, masks=True
        )

    def probe(self) -> Probe:
        """Whether NIXL-EP is installed, and a GPU is there."""
        if importlib.util.find_spec(self.module) is None:
            return Unavailable("nixl_ep is not installed: see the README of NIXL's examples")
        if not torch.cuda.is_available():
            return Unavailable("no CUDA device")
        return Available("nixl_ep.Buffer")

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> LowLatencyGroup:
        """Open a buffer, and connect all ranks. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        module = importlib.import_module(self.module)
        nbytes = module.Buffer.get_rdma_size_hint(
            config.max_tokens, config.hidden, ranks.size, config.experts
        )
        buffer = module.Buffer(
            explicitly_destroy=True, rank=ranks.rank, enable_shrink=True, group=ranks.group
        )
        buffer.update_memory_buffers(ranks.size, config.experts // ranks.size, nbytes)
        buffer.connect_ranks([rank for rank in range(ranks.size) if rank != ranks.rank])

        def destroy() -> None:
            buffer.destroy()
            ranks.close()

        calls = LowLatencyCalls(buffer.dispatch, buffer.combine, destroy, buffer.update_mask_buffer)
        index_dtype = getattr(module, "topk_idx_t", torch.int64)
        return LowLatencyGroup(config, accelerator, ranks.size, calls, index_dtype)


NIXL_EP = NixlLibrary()
