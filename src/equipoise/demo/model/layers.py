"""The small parts of a decoder layer: norm, rotary positions, router."""

import torch
from torch import Tensor

from equipoise.demo.model.config import ModelConfig
from equipoise.demo.model.rows import by_rows, product


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / root mean square of each row, times `weight`; (n, hidden) float32.

    Source: Zhang and Sennrich 2019.
    """
    means = by_rows(lambda rows: rows.square().mean(-1, keepdim=True), x)
    return x * torch.rsqrt(means + epsilon) * weight


class Rotary:
    """Rotary positions (Su et al. 2021), the two halves of a head turned against each other."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        half = config.head_width // 2
        speeds = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(config.context, dtype=torch.float64)[:, None] * speeds
        self._cos = angles.cos().float().to(device)
        self._sin = angles.sin().float().to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (n, 1, head_width / 2) float32, of (n,) int64 positions."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(n, heads, head_width) turned by the angles of `Rotary.angles`."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the `top_k` largest, renormalised.

    `x` (n, hidden), `router` (hidden, experts) -> expert ids (n, top_k) int32 and gates
    (n, top_k) float32, largest first; between equal gates the lower expert id comes first.
    """
    probabilities = by_rows(lambda rows: torch.softmax(rows, dim=-1), product(x, router))
    gates, ids = top_in_order(probabilities, top_k)
    total = by_rows(lambda rows: rows.sum(-1, keepdim=True), gates)
    return ids.to(torch.int32), gates / total


def top_in_order(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row (values, int64 indices), ties to the lower index.

    `torch.topk` leaves ties open; `torch.max` is documented to return the first maximum.
    """
    remaining = values.clone()
    picks = []
    for _ in range(k):
        _, index = remaining.max(dim=-1, keepdim=True)
        remaining.scatter_(-1, index, float("-inf"))
        picks.append(index)
    indices = torch.cat(picks, dim=-1)
    return values.gather(-1, indices), indices
