"""Buffers with the low-latency calls that DeepEP introduced: rows by expert, in blocks of one size.

DeepEP, NIXL-EP and NCCL-EP differ in names and in how a buffer is opened.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import Unsupported
from equipoise.hal.expert_parallel import (
    ExpertParallelConfig,
    ExpertParallelGroup,
    ReceivedTokens,
)
from equipoise.hal.stream import Stream

IN_FLIGHT = 2
"""DeepEP and NIXL-EP have two buffers, and say that no more than two results may be held."""


@dataclass(frozen=True)
class LowLatencyCalls:
    """The calls of a buffer.

    Attributes:
        dispatch: (x, topk_idx, max tokens of a rank, experts, use_fp8=) to (rows, counts, handle,
            event, hook).
        combine: (x, topk_idx, topk_weights, handle) to (sums, event, hook).
        destroy: releases the buffer.
        mask: (rank, masked); None where ranks cannot be masked.
    """

    dispatch: Callable[..., Any]
    combine: Callable[..., Any]
    destroy: Callable[[], None]
    mask: Callable[[int, bool], None] | None = None


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """What a combine needs: the library's handle, and copies of ids and weights."""

    native: object
    expert_ids: Tensor
    weights: Tensor


class LowLatencyGroup(ExpertParallelGroup):
    """One rank of such a buffer; adds no check to what the library checks itself.

    Args:
        config: of the group.
        accelerator: of all streams.
        ranks: of the group.
        calls: of the buffer.
        index_dtype: of expert ids, as the library takes them.
    """

    def __init__(
        self,
        config: ExpertParallelConfig,
        accelerator: Accelerator,
        ranks: int,
        calls: LowLatencyCalls,
        index_dtype: torch.dtype,
    ) -> None:
        super().__init__(accelerator, config.deadline)
        self._config = config
        self._calls = calls
        self._index_dtype = index_dtype
        self._ranks = ranks
        self._closed = False

    def dispatch(
        self, tokens: Tensor, expert_ids: Tensor, weights: Tensor, stream: Stream
    ) -> ReceivedTokens:
        """Dispatch without quantisation; blocks are [experts, ranks * max tokens, hidden]."""
        config = self._config
        with self.ordered(stream):
            # A copy even where the dtype is the same: the combine reads it.
            ids = expert_ids.to(self._index_dtype, copy=True)
            blocks, counts, native, _, _ = self._calls.dispatch(
                tokens, ids, config.max_tokens, config.experts, use_fp8=False
            )
            room = torch.arange(blocks.shape[1], device=blocks.device)
            local = torch.arange(blocks.shape[0], device=blocks.device)
            used = room[None, :] < counts[:, None]
            experts = torch.where(used, local[:, None], -1).view(-1)
            handle = LowLatencyHandle(native, ids, weights.clone())
        return ReceivedTokens(blocks.view(-1, blocks.shape[2]), experts, counts, handle)

    def combine(self, outputs: Tensor, handle: object, stream: Stream) -> Tensor:
        """Combine; the library sums by weight."""
        assert isinstance(handle, LowLatencyHandle)
        local = self._config.experts // self._ranks
        with self.ordered(stream):
            blocks = outputs.view(local, -1, outputs.shape[1])
            ids, weights = handle.expert_ids, handle.weights
            combined: Tensor = self._calls.combine(blocks, ids, weights, handle.native)[0]
        return combined

    def set_active(self, ranks: Sequence[int]) -> None:
        """Mask every rank that is not in `ranks`. Raises `Unsupported` where none can be masked."""
        if self._calls.mask is None:
            raise Unsupported("this library cannot mask ranks")
        for rank in range(self._ranks):
            self._calls.mask(rank, rank not in ranks)

    def close(self) -> None:
        """Release the buffer, once."""
        if not self._closed:
            self._closed = True
            self._calls.destroy()
