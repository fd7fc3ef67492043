"""What a trained model is like: bits per byte, routing skew, correlation of expert loads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.demo.model import Batch, Decoder, KVCache, LocalExperts, ModelWeights, Sequence

SEQUENCES = 8


@dataclass(frozen=True)
class Figures:
    """Of one kind of text: `loads` (layers, experts) int64 rows per expert."""

    bits_per_byte: float
    loads: Tensor

    def skew(self, ranks: int) -> float:
        """max / mean - 1 over ranks that hold contiguous experts, mean over layers."""
        by_rank = self.loads.view(len(self.loads), ranks, -1).sum(-1).double()
        return float((by_rank.amax(-1) / by_rank.mean(-1) - 1).mean())


class CountingExperts(LocalExperts):
    """Local experts that count the rows of each expert."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__(weights)
        self.loads = torch.zeros(weights.config.layers, weights.config.experts, dtype=torch.int64)

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `MoeLayer`."""
        self.loads[layer] += torch.bincount(expert_ids.flatten(), minlength=self.loads.shape[1])
        return super().__call__(layer, x, expert_ids, gates)


def measure(weights: ModelWeights, text: bytes) -> Figures:
    """Run the shipped inference over `text` in windows of one context, each from nothing.

    The first byte of each window is not predicted, and does not count.
    """
    decoder, experts = Decoder(weights), CountingExperts(weights)
    cache = KVCache(weights.config, SEQUENCES)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = [w for w in torch.split(tokens, weights.config.context) if len(w) > 1]
    nats, count = 0.0, 0
    for first in range(0, len(windows), SEQUENCES):
        group = windows[first : first + SEQUENCES]
        batch = Batch(tuple(Sequence(slot, window, 0) for slot, window in enumerate(group)))
        logits = decoder.forward(batch, cache, experts)
        for window, rows in zip(group, torch.split(logits, [len(w) for w in group]), strict=True):
            nats += float(F.cross_entropy(rows[:-1], window[1:], reduction="sum"))
            count += len(window) - 1
    return Figures(nats / count / 0.6931471805599453, experts.loads)


def correlation(one: Figures, other: Figures) -> float:
    """Pearson correlation of the two loads over experts, mean over layers."""
    pairs = zip(one.loads.double(), other.loads.double(), strict=True)
    return float(torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean())
