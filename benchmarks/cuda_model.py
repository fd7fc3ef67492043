"""One rank's part of a decode step: its experts' layers, and dense work that fills the step up."""

from collections.abc import Sequence

import numpy as np
import torch
from cuda_clock import Clock
from cuda_experts import BLOCK, KINDS, Dimensions, Draw
from cuda_place import Place
from torch import Tensor

from equipoise.hal.slots import Segment

SEED = 8
MATRICES = 4
"""Dense ones, used in turn: together they are far more than the device's cache holds."""
DENSE_ROWS = 64
TRIED = 4
"""Dense products in a launch when they are timed."""


class Model:
    """Weights, activations and the work of a step; all of it on persistent tensors.

    Tokens are drawn evenly: what is measured is not imbalance. Of the batch of all ranks those rows
    are computed that the router sends to this rank's slots, as many a slot as there is room for.

    Args:
        place: where.
        sizes: how large.
        dtype: a name of `KINDS`.
    """

    def __init__(self, place: Place, sizes: Dimensions, dtype: str) -> None:
        if sizes.hidden % BLOCK or sizes.intermediate % BLOCK:
            raise ValueError(f"dimensions are multiples of {BLOCK}: {sizes}")
        self.place, self.sizes, self.dtype = place, sizes, dtype
        self.experts = KINDS[dtype](place, sizes, SEED)
        draw = Draw(place, SEED + 1)
        self._hidden = draw.wide(1, sizes.tokens, sizes.hidden)[0]
        self._output = torch.zeros_like(self._hidden)
        self._dense = draw.wide(MATRICES, sizes.hidden, sizes.hidden)
        self._narrow = draw.wide(2, DENSE_ROWS, sizes.hidden)
        device = place.accelerator.device
        self._mine = torch.arange(sizes.here, dtype=torch.int32).to(device).view(-1, 1)
        self.ids = [torch.from_numpy(ids).to(device) for ids in even_ids(sizes)]
        self.padding = 0
        place.settle()

    @property
    def slots(self) -> tuple[tuple[Segment, ...], ...]:
        """Of all layers."""
        held = self.experts.segments
        count = self.sizes.layers * self.sizes.here
        return tuple(
            tuple(Segment(name, tensor[slot]) for name, tensor in held.items())
            for slot in range(count)
        )

    @property
    def traffic(self) -> int:
        """Bytes of weights that a step reads, each once."""
        experts = sum(tensor.nbytes for tensor in self.experts.segments.values())
        return int(experts + self.padding * self._dense[0].nbytes)

    def layer(self, layer: int, slots: Tensor) -> None:
        """The experts of a layer, for rows that were routed to `slots`, int32 [tokens, top_k]."""
        hits = (slots.view(1, -1) == self._mine).float()
        found = torch.topk(hits, self.sizes.rows, dim=1)
        tokens = found.indices // self.sizes.top_k
        done = self.experts.apply(layer, self._hidden[tokens])
        weighted = done * found.values[:, :, None].to(done.dtype)
        self._output.index_add_(0, tokens.view(-1), weighted.view(-1, self.sizes.hidden))

    def begin(self) -> None:
        """Clear what the step writes."""
        self._output.zero_()

    def fill_up(self) -> None:
        """The dense work of a step."""
        for turn in range(self.padding):
            self._product(turn)

    def fill_to(self, clock: Clock, seconds: float, bytes_: int, bare: float) -> None:
        """As many dense products that a step takes so long and reads so many bytes.

        Args:
            clock: of the stream that computes.
            seconds: at least.
            bytes_: at least.
            bare: seconds of a step without them.
        """

        def tried() -> None:
            for turn in range(TRIED * MATRICES):
                self._product(turn)

        for _ in range(2):  # the first one loads what it needs
            took = clock.span(lambda: clock.stream.launch(tried)) / (TRIED * MATRICES)
        self.padding = 0
        by_time = (seconds - bare) / took
        by_bytes = (bytes_ - self.traffic) / self._dense[0].nbytes
        self.padding = max(0, int(np.ceil(max(by_time, by_bytes))))

    def _product(self, turn: int) -> None:
        source, target = self._narrow[turn % 2], self._narrow[(turn + 1) % 2]
        torch.mm(source, self._dense[turn % MATRICES], out=target)


def even_ids(sizes: Dimensions) -> Sequence[np.ndarray]:
    """By layer, int32 [tokens, top_k]: different experts for each token, all equally likely."""
    rng = np.random.default_rng(SEED)
    drawn = rng.random((sizes.layers, sizes.tokens, sizes.experts))
    return list(np.argsort(drawn, axis=2)[:, :, : sizes.top_k].astype(np.int32))
