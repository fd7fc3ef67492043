"""A stand-in for `nccl.ep` on the host: what its docstrings and header say, over gloo.

What they leave open is junk: rows that are not filled, their ids and their weights.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from helpers.fakes.fake_expert_buffers import Place, gather
from torch import Tensor as Buffer


class NcclInvalid(Exception):
    """A handle or a group was destroyed."""


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class Tensor:
    """A descriptor: of memory without gaps."""

    def __init__(self, buffer: Buffer) -> None:
        assert buffer.is_contiguous()
        self.buffer = buffer


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass(frozen=True, kw_only=True)
class DispatchInputs:
    tokens: Tensor
    topk_weights: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DispatchOutputs:
    tokens: Tensor
    topk_weights: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CombineInputs:
    tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class CombineOutputs:
    tokens: Tensor
    topk_weights: Tensor | None = None


class Communicator:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def destroy(self) -> None:
        """Nothing is held."""


class Handle:
    """The routing of one step."""

    def __init__(self, group: "Group", topk_idx: Tensor) -> None:
        self._ids = topk_idx.buffer
        self._places: list[list[Place]] = []
        self._group = group
        self._destroyed = False

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        stream: int,
    ) -> None:
        self._check_valid()
        raise NotImplementedError

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *, stream: int) -> None:
        self._check_valid()
        raise NotImplementedError

    def destroy(self) -> None:
        self._destroyed = True

    def _check_valid(self) -> None:
        if self._destroyed:
            raise NcclInvalid("Cannot combine: Handle is not initialized or has been destroyed")

    def _sources(self, *own: Buffer) -> list[Any]:
        return gather(self._group.ranks, (self._ids, *own))


class ExpertMajorHandle(Handle):
    """Rows by local expert; sums by weight on receipt."""

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        stream: int,
    ) -> None:
        self._check_valid()
        assert layout_info is not None
        assert layout_info.expert_counters is not None
        blocks, counts = outputs.tokens.buffer, layout_info.expert_counters.buffer
        group, local = self._group, self._group.local
        rooms = group.size * group.config.max_dispatch_tokens_per_rank
        assert blocks.shape[:2] == (local, rooms)
        assert counts.dtype == torch.int32
        blocks.fill_(float("nan"))
        self._places = [[] for _ in range(local)]
        for source, (ids, tokens) in enumerate(self._sources(inputs.tokens.buffer)):
            for token, choices in enumerate(ids.tolist()):
                for expert in choices:
                    if expert // local == group.rank:
                        own = self._places[expert % local]
                        blocks[expert % local, len(own)] = tokens[token]
                        own.append((source, token))
        counts.copy_(torch.tensor([len(own) for own in self._places]))

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *, stream: int) -> None:
        self._check_valid()
        assert outputs.topk_weights is not None
        weights, out = outputs.topk_weights.buffer, outputs.tokens.buffer
        assert weights.dtype == torch.float32
        first = self._group.rank * self._group.local
        rows = inputs.tokens.buffer
        sent = [(place, first + local) for local, own in enumerate(self._places) for place in own]
        used = torch.cat([rows[local, : len(own)] for local, own in enumerate(self._places)])
        total = torch.zeros(out.shape, dtype=torch.float32)
        for targets, answers in gather(self._group.ranks, (sent, used)):
            for ((home, token), expert), row in zip(targets, answers, strict=True):
                if home == self._group.rank:
                    weight = weights[token][self._ids[token] == expert].sum()
                    total[token] += weight * row.float()
        out.copy_(total)


class FlatHandle(Handle):
    """A token once on each rank, with its choices; the caller has summed by weight."""

    def __init__(self, group: "Group", topk_idx: Tensor, layout_info: LayoutInfo) -> None:
        super().__init__(group, topk_idx)
        assert layout_info.recv_topk_idx_kind is ExpertIdKind.LOCAL
        assert layout_info.recv_total_counter is not None
        arriving = [
            (source, token, choices)
            for source, (ids,) in enumerate(self._sources())
            for token, choices in enumerate(ids.tolist())
            if any(expert // group.local == group.rank for expert in choices)
        ]
        self._arriving = arriving
        layout_info.recv_total_counter.buffer.fill_(len(arriving))

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        stream: int,
    ) -> None:
        self._check_valid()
        assert layout_info is None
        assert inputs.topk_weights is not None
        assert outputs.topk_weights is not None
        assert outputs.topk_idx is not None
        group = self._group
        rows, weights = outputs.tokens.buffer, outputs.topk_weights.buffer
        chosen = outputs.topk_idx.buffer
        assert rows.shape[0] == group.config.max_recv_tokens_per_rank
        rows.fill_(float("nan"))
        weights.fill_(float("nan"))
        chosen.fill_(0)  # of slots that are not filled nothing is said
        sources = self._sources(inputs.tokens.buffer, inputs.topk_weights.buffer)
        for slot, (source, token, choices) in enumerate(self._arriving):
            _, tokens, scales = sources[source]
            ids = torch.tensor(choices)
            here = torch.div(ids, group.local, rounding_mode="floor") == group.rank
            rows[slot] = tokens[token]
            chosen[slot] = torch.where(here, ids % group.local, -1)
            weights[slot] = torch.where(here, scales[token], float("nan"))

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *, stream: int) -> None:
        self._check_valid()
        assert outputs.topk_weights is None
        rows, out = inputs.tokens.buffer, outputs.tokens.buffer
        places = [(source, token) for source, token, _ in self._arriving]
        total = torch.zeros(out.shape, dtype=torch.float32)
        for targets, answers in gather(self._group.ranks, (places, rows[: len(places)])):
            for (home, token), row in zip(targets, answers, strict=True):
                if home == self._group.rank:
                    total[token] += row.float()
        out.copy_(total)


class Group:
    def __init__(self, communicator: Communicator, config: GroupConfig) -> None:
        self.ranks, self.config = communicator.group, config
        self.rank, self.size = self.ranks.rank(), self.ranks.size()
        self.local = config.num_experts // self.size

    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> "Group":
        assert config.num_experts % comm.group.size() == 0
        assert config.max_recv_tokens_per_rank >= config.max_dispatch_tokens_per_rank > 0
        assert config.max_token_bytes % 16 == 0
        return cls(comm, config)

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo | None = None,
        stream: int,
    ) -> Handle:
        assert topk_idx.buffer.dtype == torch.int64
        assert topk_idx.buffer.shape[0] <= self.config.max_dispatch_tokens_per_rank
        if self.config.algorithm is Algorithm.LOW_LATENCY:
            assert layout is Layout.EXPERT_MAJOR
            assert layout_info is None
            return ExpertMajorHandle(self, topk_idx)
        assert layout is Layout.FLAT
        assert layout_info is not None
        return FlatHandle(self, topk_idx, layout_info)

    def destroy(self) -> None:
        """Nothing is held."""
