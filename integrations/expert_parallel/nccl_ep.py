"""NCCL-EP as expert-parallel libraries: its low-latency and its high-throughput algorithm.

Written against the Python package `nccl.ep` of the distribution nccl-extensions 0.1.0, and the
`nccl_ep.h` that it contains.
"""

import importlib
import importlib.util
from contextlib import ExitStack
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
from equipoise.integrations.expert_parallel.low_latency import LowLatencyCalls, LowLatencyGroup
from equipoise.integrations.expert_parallel.process_group import ProcessGroup

MODULE = "nccl.ep"
HIDDEN_SIZES = (4096, 7168)
"""Row lengths that its examples and measurements use; the header names no others."""
THROUGHPUT_EXPERTS = (1, 2, 4, 8, 16, 32, 64)
"""Experts per rank of the high-throughput algorithm: powers of two."""
THROUGHPUT_GROUP_SIZES = (4, 8, 16, 32, 64)
"""Numbers of ranks: an NVLink domain needs a multiple of 4 experts, however few a rank has."""


class NcclGroup:
    """An EP group of NCCL-EP over a communicator of its own.

    Args:
        config: of the group.
        ranks: the process group, closed with this one, and where this one cannot be created.
        module: `nccl.ep`.
        algorithm: name of a member of its `Algorithm`.

    Raises:
        Exception: whatever NCCL-EP raises.
    """

    def __init__(
        self, config: ExpertParallelConfig, ranks: ProcessGroup, module: Any, algorithm: str
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.module = module
        interop = importlib.import_module(f"{module.__name__}.interop.torch")
        with ExitStack() as undo:
            undo.callback(ranks.close)
            self._communicator = interop.get_nccl_comm_from_group(ranks.group)
            undo.callback(self._communicator.destroy)
            self.group = module.Group.create(
                self._communicator,
                module.GroupConfig(
                    algorithm=module.Algorithm[algorithm],
                    num_experts=config.experts,
                    max_dispatch_tokens_per_rank=config.max_tokens,
                    max_recv_tokens_per_rank=ranks.size * config.max_tokens,
                    max_token_bytes=config.hidden * config.dtype.itemsize,
                ),
            )
            undo.callback(self.group.destroy)
            self._owned = undo.pop_all()

    def close(self) -> None:
        """Release the group, then the communicator, then the process group, once."""
        self._owned.close()


class LowLatencyHandles:
    """Low-latency calls in the form of DeepEP's: a handle for each dispatch, until it is combined.

    Args:
        nccl: the group.
    """

    def __init__(self, nccl: NcclGroup) -> None:
        self._nccl = nccl

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, most: int, experts: int, use_fp8: bool
    ) -> tuple[Tensor, Tensor, Any, None, None]:
        """Rows by local expert, [local experts, ranks * most, hidden], and their counts."""
        ep, size = self._nccl.module, self._nccl.ranks.size
        stream = current_stream(tokens)
        handle = self._nccl.group.create_handle(
            ep.Layout.EXPERT_MAJOR, ep.Tensor(expert_ids), stream=stream
        )
        rows = tokens.new_empty((experts // size, size * most, tokens.shape[1]))
        counts = torch.empty(experts // size, dtype=torch.int32, device=tokens.device)
        handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(tokens)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows)),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts)),
            stream=stream,
        )
        return rows, counts, handle, None, None

    def combine(
        self, rows: Tensor, expert_ids: Tensor, weights: Tensor, handle: Any
    ) -> tuple[Tensor, None, None]:
        """Sums by weight, [n, hidden]; the handle is destroyed."""
        ep = self._nccl.module
        out = rows.new_empty((weights.shape[0], rows.shape[2]))
        handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(rows)),
            ep.CombineOutputs(tokens=ep.Tensor(out), topk_weights=ep.Tensor(weights)),
            stream=current_stream(rows),
        )
        handle.destroy()
        return out, None, None


@dataclass(frozen=True, eq=False)
class ThroughputHandle:
    """What a high-throughput combine needs.

    Attributes:
        native: the library's handle.
        expert_ids: int64 [n, top_k] of the tokens dispatched; the library's handle refers to them.
        choices: of the slots of the received tokens.
    """

    native: Any
    expert_ids: Tensor
    choices: LocalChoices


class ThroughputGroup(ExpertParallelGroup):
    """One rank of the high-throughput algorithm, layout FLAT: a token arrives once on a rank.

    As the header asks of callers, this multiplies by weight and adds up on the rank of the experts,
    in float32.

    Args:
        accelerator: of all streams.
        nccl: the group, closed with this one.
    """

    def __init__(self, accelerator: Accelerator, nccl: NcclGroup) -> None:
        super().__init__(accelerator, nccl.config.deadline)
        self._nccl = nccl

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Make a handle, dispatch, and list a row for each choice of a received token."""
        ep = self._nccl.module
        slots, top_k = self._nccl.ranks.size * self._nccl.config.max_tokens, expert_ids.shape[1]
        with self.ordered(stream):
            cuda_stream = current_stream(tokens)
            ids = expert_ids.long()
            received = tokens.new_empty((slots, tokens.shape[1]))
            received_weights = weights.new_empty((slots, top_k))
            received_ids = torch.empty((slots, top_k), dtype=torch.int64, device=tokens.device)
            total = torch.empty(1, dtype=torch.int32, device=tokens.device)
            handle = self._nccl.group.create_handle(
                ep.Layout.FLAT,
                ep.Tensor(ids),
                layout_info=ep.LayoutInfo(
                    recv_total_counter=ep.Tensor(total), recv_topk_idx_kind=ep.ExpertIdKind.LOCAL
                ),
                stream=cuda_stream,
            )
            handle.dispatch(
                ep.DispatchInputs(tokens=ep.Tensor(tokens), topk_weights=ep.Tensor(weights)),
                ep.DispatchOutputs(
                    tokens=ep.Tensor(received),
                    topk_weights=ep.Tensor(received_weights),
                    topk_idx=ep.Tensor(received_ids),
                ),
                stream=cuda_stream,
            )
            filled = torch.arange(slots, device=tokens.device) < total
            local = torch.where(filled[:, None], received_ids, -1)
            choices = LocalChoices(local, received_weights)
            rows = choices.rows(received)
        return ReceivedTokens(rows, local.view(-1), None, ThroughputHandle(handle, ids, choices))

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Add up by weight what belongs to one received token, combine, and destroy the handle."""
        assert isinstance(handle, ThroughputHandle)
        ep = self._nccl.module
        with self.ordered(stream):
            out = outputs.new_empty((handle.expert_ids.shape[0], outputs.shape[1]))
            handle.native.combine(
                ep.CombineInputs(tokens=ep.Tensor(handle.choices.sum(outputs))),
                ep.CombineOutputs(tokens=ep.Tensor(out)),
                stream=current_stream(outputs),
            )
            handle.native.destroy()
        return out

    def close(self) -> None:
        """Release the group and the process group, once."""
        self._nccl.close()


def current_stream(tensor: Tensor) -> int:
    """The current stream of the tensor's device, as NCCL-EP takes it; 0 on the host."""
    if tensor.device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def probe_module(module: str) -> Probe:
    """Whether NCCL-EP is installed, and a GPU is there."""
    try:
        installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        installed = False
    if not installed:
        return Unavailable("nccl.ep is not installed: pip install 'nccl-extensions[cu13]'")
    if not torch.cuda.is_available():
        return Unavailable("no CUDA device")
    return Available("nccl.ep.Group")


@dataclass(frozen=True)
class LowLatencyLibrary:
    """NCCL-EP's low-latency algorithm, layout EXPERT_MAJOR, without quantisation."""

    name: str = "nccl-ep-low-latency"
    module: str = MODULE

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """What its header and README say; no more. Masks are not in the Python package."""
        return ExpertParallelCapabilities(hidden_sizes=HIDDEN_SIZES, padding=True, counts=True)

    def probe(self) -> Probe:
        """Whether it can run here."""
        return probe_module(self.module)

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> LowLatencyGroup:
        """Open a group over a process group of its own. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        nccl = NcclGroup(config, ranks, importlib.import_module(self.module), "LOW_LATENCY")
        handles = LowLatencyHandles(nccl)
        calls = LowLatencyCalls(handles.dispatch, handles.combine, nccl.close)
        return LowLatencyGroup(config, accelerator, ranks.size, calls, torch.int64)


@dataclass(frozen=True)
class ThroughputLibrary:
    """NCCL-EP's high-throughput algorithm, layout FLAT, without quantisation."""

    name: str = "nccl-ep"
    module: str = MODULE

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        """What its header and its assertions say; no more."""
        return ExpertParallelCapabilities(
            hidden_sizes=HIDDEN_SIZES,
            experts_per_rank=THROUGHPUT_EXPERTS,
            group_sizes=THROUGHPUT_GROUP_SIZES,
        )

    def probe(self) -> Probe:
        """Whether it can run here."""
        return probe_module(self.module)

    def open(
        self, config: ExpertParallelConfig, accelerator: Accelerator, fabric: Fabric, purpose: str
    ) -> ThroughputGroup:
        """Open a group over a process group of its own. Raises as `ProcessGroup`."""
        ranks = ProcessGroup(fabric, purpose, accelerator.device, config.deadline)
        module = importlib.import_module(self.module)
        return ThroughputGroup(accelerator, NcclGroup(config, ranks, module, "HIGH_THROUGHPUT"))


LOW_LATENCY = LowLatencyLibrary()
THROUGHPUT = ThroughputLibrary()
