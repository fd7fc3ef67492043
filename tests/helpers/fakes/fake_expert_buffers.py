"""Stand-ins for DeepEP's and NIXL-EP's `Buffer`, on the host: what their docstrings say, over gloo.

They prove that the adapters put rows, ids and weights where the published signatures want them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
Place = tuple[int, int]
"""Rank and number of a token."""


def gather(group: dist.ProcessGroup | None, own: Any) -> list[Any]:
    """What every rank has."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group)
    return gathered


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class _LowLatency:
    """Rows by expert, in blocks of one size; combined by weight."""

    group: dist.ProcessGroup

    def _dispatch(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, use_fp8: bool
    ) -> tuple[Tensor, Tensor, Any, None, None]:
        assert not use_fp8
        assert topk_idx.dtype == topk_idx_t
        assert x.shape[0] <= most
        rank, size = self.group.rank(), self.group.size()
        local = num_experts // size
        blocks = torch.full((local, most * size, x.shape[1]), float("nan"), dtype=x.dtype)
        places: list[list[Place]] = [[] for _ in range(local)]
        for source, (rows, ids) in enumerate(gather(self.group, (x, topk_idx))):
            for token, choices in enumerate(ids.tolist()):
                for expert in choices:
                    if expert // local == rank:
                        own = places[expert % local]
                        blocks[expert % local, len(own)] = rows[token]
                        own.append((source, token))
        counts = torch.tensor([len(own) for own in places], dtype=torch.int32)
        return blocks, counts, (places, rank * local), None, None

    def _combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, None, None]:
        places, first = handle
        sent = [(place, first + local) for local, own in enumerate(places) for place in own]
        used = torch.cat([x[local, : len(own)] for local, own in enumerate(places)])
        out = torch.zeros(topk_idx.shape[0], x.shape[2], dtype=torch.float32)
        for targets, rows in gather(self.group, (sent, used)):
            for ((home, token), expert), row in zip(targets, rows, strict=True):
                if home == self.group.rank():
                    weight = topk_weights[token][topk_idx[token] == expert].sum()
                    out[token] += weight * row.float()
        return out.to(x.dtype), None, None


class Buffer(_LowLatency):
    """DeepEP's."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
    ) -> None:
        assert num_nvl_bytes > 0 or low_latency_mode
        assert explicitly_destroy
        self.group = group

    def destroy(self) -> None:
        """Nothing is held."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, None, Tensor, Tensor, None]:
        assert topk_idx.dtype == topk_idx_t
        local = num_experts // self.group.size()
        ranks = torch.arange(self.group.size())
        homes = torch.div(topk_idx, local, rounding_mode="floor")
        in_rank = (homes[:, :, None] == ranks).any(1)
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, list[int], list[Place], None]:
        rank = self.group.rank()
        local = num_tokens_per_expert.numel() // self.group.size()
        rows, ids, weights, places = [], [], [], list[Place]()
        own = (x, topk_idx, topk_weights, is_token_in_rank)
        for source, (tokens, choices, scales, present) in enumerate(gather(self.group, own)):
            for token in present[:, rank].nonzero().view(-1).tolist():
                here = torch.div(choices[token], local, rounding_mode="floor") == rank
                rows.append(tokens[token])
                ids.append(torch.where(here, choices[token] % local, -1))
                weights.append(torch.where(here, scales[token], 0.0))
                places.append((source, token))
        received_ids = _stack(ids, topk_idx)
        counts = torch.bincount(received_ids[received_ids >= 0], minlength=local).tolist()
        return (
            _stack(rows, x),
            received_ids,
            _stack(weights, topk_weights),
            counts,
            [(x.shape[0], rank), *places],
            None,
        )

    def combine(self, x: Tensor, handle: list[Place]) -> tuple[Tensor, None, None]:
        (count, rank), *places = handle
        out = torch.zeros(count, x.shape[1], dtype=torch.float32)
        for targets, rows in gather(self.group, (places, x)):
            for (home, token), row in zip(targets, rows, strict=True):
                if home == rank:
                    out[token] += row.float()
        return out.to(x.dtype), None, None

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> tuple[Tensor, Tensor, Any, None, None]:
        most = num_max_dispatch_tokens_per_rank
        return self._dispatch(x, topk_idx, most, num_experts, use_fp8)

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, None, None]:
        return self._combine(x, topk_idx, topk_weights, handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        raise NotImplementedError("no rank is lost here")


class NixlBuffer(_LowLatency):
    """NIXL-EP's."""

    def __init__(
        self,
        nvlink_backend: str = "nixl",
        explicitly_destroy: bool = False,
        rank: int = 0,
        enable_shrink: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        assert group is not None
        assert rank == group.rank()
        self.group = group

    def destroy(self) -> None:
        """Nothing is held."""

    @staticmethod
    def get_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int
    ) -> None:
        assert num_ranks == self.group.size()

    def connect_ranks(self, remote_ranks: Sequence[int]) -> None:
        assert self.group.rank() not in remote_ranks

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> tuple[Tensor, Tensor, Any, None, None]:
        most = num_max_dispatch_tokens_per_rank
        return self._dispatch(x, topk_idx, most, num_experts, use_fp8)

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, None, None]:
        return self._combine(x, topk_idx, topk_weights, handle)

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        raise NotImplementedError("no rank is lost here")


def _stack(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like[:0]
