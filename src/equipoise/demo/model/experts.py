"""The experts: one on its rows, all in one process, and the sum of a token's experts."""

from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.demo.model.rows import pad_rows, product
from equipoise.demo.model.weights import ModelWeights


class MoeLayer(Protocol):
    """What the decoder calls in place of a feed-forward block."""

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """Weighted outputs of each row's experts.

        `x` (N, hidden) float32, `expert_ids` (N, top_k) int32, `gates` (N, top_k) float32 ->
        (N, hidden) float32, summed by `combine_in_order`. N may be 0: an idle rank still calls.
        """
        ...


def combine_in_order(rows: Tensor, gates: Tensor) -> Tensor:
    """((g0*y0 + g1*y1) + g2*y2) + g3*y3 in float32: the only place that sums experts.

    `rows` (N, top_k, hidden) float32, `gates` (N, top_k) float32 -> (N, hidden) float32. Product
    and sum are separate operations, so that no fused multiply-add rounds otherwise.
    """
    total = rows[:, 0] * gates[:, 0:1]
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k] * gates[:, k : k + 1]
    return total


def expert_rows(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """One gated expert on its rows: (silu(x Wg) * (x Wu)) Wd.

    `x` (n, hidden), `w_gate_up` (hidden, 2 * width) gate first, `w_down` (width, hidden), all
    float32 -> (n, hidden) float32. Rows are padded here to a multiple of 8.
    """
    width = w_down.shape[0]
    both = product(pad_rows(x), w_gate_up)
    inner = F.silu(both[:, :width]) * both[:, width:]
    return product(inner, w_down)[: x.shape[0]]


def group_by_expert(expert_ids: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """(token, k) pairs sorted by expert, pairs of one expert in their own order.

    `expert_ids` (N, top_k) int32 -> (N * top_k,) int64 flat indices into `expert_ids`, and
    experts + 1 bounds: expert e owns the indices from bounds[e] to bounds[e + 1].
    """
    flat = expert_ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    return order, [0, *counts.cumsum(0).tolist()]


class LocalExperts:
    """The reference: all experts of all layers in this process, no exchange."""

    def __init__(self, weights: ModelWeights) -> None:
        self._gate_up = [list(layer) for layer in weights.gate_up]
        self._down = [list(layer) for layer in weights.down]

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `MoeLayer`."""
        gate_up, down = self._gate_up[layer], self._down[layer]
        order, bounds = group_by_expert(expert_ids, len(down))
        packed = x[order // expert_ids.shape[1]]
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                packed[start:stop] = expert_rows(packed[start:stop], gate_up[expert], down[expert])
        rows = torch.empty_like(packed)
        rows[order] = packed
        return combine_in_order(rows.view(*expert_ids.shape, x.shape[1]), gates)
