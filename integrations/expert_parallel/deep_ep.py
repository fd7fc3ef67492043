"""DeepEP's `Buffer`, normal and low-latency, as expert-parallel libraries.

Written against the signatures of `deep_ep.Buffer` (`deep_ep/buffers/legacy.py` since version 2).
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from equipoise.integrations.expert_parallel.local_choices import LocalChoices
from equipoise.integrations.expert_parallel.low_latency import (
    IN_FLIGHT,
    LowLatencyCalls,
    LowLatencyGroup,
)
from equipoise.integrations.expert_parallel.process_group import ProcessGroup

LOW_LATENCY_HIDDEN_SIZES = (2560, 5120, 7168)
"""Row lengths that every version's low-latency kernels are compiled for."""
NORMAL_GROUP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Numbers of ranks that `get_dispatch_config` knows."""
MODULE = "deep_ep"


def probe_module(module: str) -> Probe:
    """Whether DeepEP is installed, and a GPU is there."""
    if importlib.util.find_spec(module) is None:
        return Unavailable("deep_ep is not installed: see the project's README")
    if not torch.cuda.is_available():
        return Unavailable("no CUDA device")
    return Available("deep_ep.Buffer")


@dataclass(frozen=True, eq=False)
class NormalHandle:
    """What a normal combine needs: the library's handle, and the choices of received tokens."""

    native: object
    choices: LocalChoices


class NormalGroup(ExpertParallelGroup):
    """One rank of a normal buffer.

    DeepEP sends a token once to each rank, however many of its experts are there, and adds what
    ranks return without weights. As its callers do, this multiplies by weight and adds up on the
    rank of the experts, in float32.

    Args:
        config: of the group.
        accelerator: of all streams.
        ranks: the process group, closed with this group.
        module: DeepEP.
    """

    def __init__(
        self,
        config: ExpertParallelConfig,
        accelerator: Accelerator,
        ranks: ProcessGroup,
        module: Any,
    ) -> None:
        super().__init__(accelerator, config.deadline)
        buffer_type = module.Buffer
        row_bytes = config.hidden * max(2, config.dtype.itemsize)
        hints = (
            buffer_type.get_dispatch_config(ranks.size),
            buffer_type.get_combine_config(ranks.size),
        )
        self._buffer: Any = buffer_type(
            ranks.group,
            max(hint.get_nvl_buffer_size_hint(row_bytes, ranks.size) for hint in hints),
            max(hint.get_rdma_buffer_size_hint(row_bytes, ranks.size) for hint in hints),
            explicitly_destroy=True,
        )
        self._index_dtype: torch.dtype = getattr(module, "topk_idx_t", torch.int64)
        self._config = config
        self._ranks = ranks
        self._closed = False

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Compute the layout, dispatch, and list a row for each choice of a received token."""
        with self.ordered(stream):
            ids = expert_ids.to(self._index_dtype)
            per_rank, per_rdma_rank, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
                ids, self._config.experts
            )
            received, local_ids, local_weights, counts, native, _ = self._buffer.dispatch(
                tokens,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
            )
            choices = LocalChoices(local_ids, local_weights)
            expert_counts = torch.tensor(counts, device=received.device)
            rows, experts = choices.rows(received), local_ids.reshape(-1)
        return ReceivedTokens(rows, experts, expert_counts, NormalHandle(native, choices))

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Add up by weight what belongs to one received token, and combine."""
        assert isinstance(handle, NormalHandle)
        with self.ordered(stream):
            partial_sums = handle.choices.sum(outputs)
            combined: Tensor = self._buffer.combine(partial_sums, handle.native)[0]
        return combined

    def close(self) -> None:
        """Release the buffer and the process group, once."""
        if not self._closed:
            self._closed = True
            self._buffer.destroy()
            self._ranks.close()


@dataclass(frozen=True)
class NormalLibrary:
    """DeepEP's normal kernels."""

    name: str = "deep-ep"
    module: str = MODULE

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """What its docstrings say; no more."""
        return ExpertParallelCapabilities(group_sizes=NORMAL_GROUP_SIZES, padding=True, counts=True)

    def probe(self) -> Probe:
        """Whether it can run here."""
        return probe_module(self.module)

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> NormalGroup:
        """Open a buffer over a process group of its own. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        return NormalGroup(config, accelerator, ranks, importlib.import_module(self.module))


@dataclass(frozen=True)
class LowLatencyLibrary:
    """DeepEP's low-latency kernels, without FP8."""

    name: str = "deep-ep-low-latency"
    module: str = MODULE

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """What its docstrings say; no more."""
        return ExpertParallelCapabilities(
            hidden_sizes=LOW_LATENCY_HIDDEN_SIZES,
            padding=True,
            counts=True,
            in_flight=IN_FLIGHT,
            masks=True,
            graph_capture=True,
        )

    def probe(self) -> Probe:
        """Whether it can run here."""
        return probe_module(self.module)

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> LowLatencyGroup:
        """Open a buffer over a process group of its own. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        module = importlib.import_module(self.module)
        nbytes = module.Buffer.get_low_latency_rdma_size_hint(
            config.max_tokens, config.hidden, ranks.size, config.experts
        )
        buffer = module.Buffer(
            ranks.group,
            num_rdma_bytes=nbytes,
            low_latency_mode=True,
            num_qps_per_rank=config.experts // ranks.size,
            explicitly_destroy=True,
            enable_shrink=True,
        )

        def destroy() -> None:
            buffer.destroy()
            ranks.close()

        calls = LowLatencyCalls(
            buffer.low_latency_dispatch,
            buffer.low_latency_combine,
            destroy,
            buffer.low_latency_update_mask_buffer,
        )
        index_dtype = getattr(module, "topk_idx_t", torch.int64)
        return LowLatencyGroup(config, accelerator, ranks.size, calls, index_dtype)


NORMAL = NormalLibrary()
LOW_LATENCY = LowLatencyLibrary()
