"""The shipped model's own routing: what it asks of its experts while the kind of text switches.

    from recorded import record
    record(seed=0, steps=192)

One process serves the traffic of the main job, as the reference pass of `equipoise run` does, and
notes for every step which experts each token goes to. Routing is a matter of the model and the
text alone: placement and shares do not change it. Nothing is written to disk.

`python benchmarks/recorded.py` prints what the recorded loads look like.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equipoise.demo.model import Decoder, KVCache, LocalExperts, ModelWeights, load_weights
from equipoise.demo.requests import Desk, capacity
from equipoise.demo.traffic import Traffic, load_phases

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Step:
    """One forward.

    Attributes:
        ids: (layers, tokens, top_k), the experts of each token; tokens of prompts come first.
        prompt: how many of the tokens are of prompts.
    """

    ids: Ids
    prompt: int

    @property
    def decoding(self) -> Ids:
        """(layers, sequences, top_k): the tokens that continue a sequence, one of each."""
        found: Ids = self.ids[:, self.prompt :]
        return found


@dataclass(frozen=True)
class Recording:
    """One pass over the traffic.

    Attributes:
        steps: every forward.
        switches: the first step of every kind of text but the first.
        experts: of a layer.
    """

    steps: tuple[Step, ...]
    switches: tuple[int, ...]
    experts: int

    def rows(self) -> Counts:
        """(steps, layers, experts): rows, one per (token, k)."""
        return np.stack([counted(step.ids, self.experts) for step in self.steps])


class _Notes:
    """A `MoeLayer` that keeps the expert ids it is called with."""

    def __init__(self, weights: ModelWeights) -> None:
        self._inner = LocalExperts(weights)
        self._ids: list[Ids] = []

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `equipoise.demo.model.MoeLayer`."""
        self._ids.append(expert_ids.numpy().astype(np.int32))
        return self._inner(layer, x, expert_ids, gates)

    def take(self) -> Ids:
        """(layers, tokens, top_k) of the forward that has just ended."""
        ids, self._ids = np.stack(self._ids), []
        return ids


def counted(ids: Ids, experts: int) -> Counts:
    """(layers, experts): how often each expert occurs in `ids` (layers, tokens, top_k)."""
    flat = ids.reshape(ids.shape[0], -1)
    return np.stack([np.bincount(row, minlength=experts) for row in flat]).astype(np.int64)


def record(seed: int, steps: int) -> Recording:
    """Serve so many steps of the main job's traffic, its phases of equal length."""
    torch.set_num_threads(1)
    weights = load_weights()
    traffic = Traffic(load_phases(), steps, seed=seed)
    served = tuple(_serve(weights, traffic))
    return Recording(served, traffic.switch_steps, weights.config.experts)


def recordings(seeds: Iterable[int], steps: int) -> Iterator[Recording]:
    """One recording for each seed, saying so: each takes half a minute."""
    for seed in seeds:
        sys.stderr.write(f"recording {steps} steps, seed {seed}\n")
        yield record(seed, steps)


def _serve(weights: ModelWeights, traffic: Traffic) -> Iterator[Step]:
    desk, decoder, notes = Desk(traffic, 0, 1), Decoder(weights), _Notes(weights)
    cache = KVCache(weights.config, capacity(traffic, ranks=1), weights.device)
    for step in range(traffic.steps):
        batch = desk.batch(step)
        desk.take(batch, decoder.forward(batch, cache, notes))
        yield Step(notes.take(), batch.rows - len(batch.decode))


def main() -> None:
    """Print how uneven experts are, and how alike the loads of neighbouring and switched steps."""
    (found,) = recordings([0], 96)
    rows = found.rows().astype(np.float64)
    print(f"rows of a step and layer: {rows.sum(axis=2).mean():.0f}")
    print(f"experts, max/mean - 1: {(rows.max(axis=2) / rows.mean(axis=2) - 1).mean():.3f}")
    pairs = {"next step": [(10, 11), (40, 41), (80, 81)], "across a switch": [(10, 40), (40, 80)]}
    for name, steps in pairs.items():
        alike = [np.corrcoef(rows[a, i], rows[b, i])[0, 1] for a, b in steps for i in range(6)]
        print(f"correlation of expert loads, {name}: {np.mean(alike):.2f}")


if __name__ == "__main__":
    main()
