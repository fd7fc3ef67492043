"""One rank's part of a decode step at the dimensions of DeepSeek-V3, with its weights on the host.

Experts are in bfloat16, or in float8 with scales; dense work fills the step up. Weights are drawn
on the device from a seed. `rows` of each slot are multiplied: the capacity of an expert in a step,
so that every shape is known when a graph is captured. `Ccl` holds what slots are written from
under locks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from equipoise.hal.checksum import MASK64
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role
from gpu.stopwatch import DEADLINE, Clock, Place

BLOCK = 128
"""Rows and columns of a matrix that share a scale."""
LARGEST = 448.0
"""Of a float8 number."""
ROUGH = 0.1
"""By how much of the largest element a product of float8 may be off."""
BFLOAT16, FLOAT8 = "bfloat16", "float8"
Matrices = dict[str, Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""bfloat16 [rows, inner] by the matrix float8 [outer, inner] with its scales, transposed."""


@dataclass(frozen=True)
class Dimensions:
    """How large the model is.

    Attributes:
        hidden: of a token.
        intermediate: of an expert.
        experts: of a layer, over all ranks.
        slots: of a layer, over all ranks.
        ranks: that share a layer; one of them is here.
        layers: that have experts.
        tokens: of the batch of all ranks.
        top_k: experts of a token.
        rows: that a slot takes in a step.
    """

    hidden: int
    intermediate: int
    experts: int
    slots: int
    ranks: int
    layers: int
    tokens: int
    top_k: int
    rows: int

    @property
    def here(self) -> int:
        """Slots of a layer on this rank."""
        return self.slots // self.ranks


class Experts(Protocol):
    """The experts of all layers."""

    segments: Matrices
    """By name, [layers * slots, ...]: row layer * slots + slot is a slot's."""
    way: str
    """How they are multiplied, in words."""

    def apply(self, layer: int, tokens: Tensor) -> Tensor:
        """Of [slots, rows, hidden] the same, after the expert in each slot."""
        ...


class WideExperts:
    """In bfloat16: a product of all slots at once."""

    way = "one batched product a matrix"

    def __init__(self, place: Place, sizes: Dimensions, seed: int) -> None:
        count = sizes.layers * sizes.here
        draw = Draw(place, seed)
        self.segments = {
            "w13": draw.wide(count, 2 * sizes.intermediate, sizes.hidden),
            "w2": draw.wide(count, sizes.hidden, sizes.intermediate),
        }
        self._here = sizes.here

    def apply(self, layer: int, tokens: Tensor) -> Tensor:
        """Two products, and what is between them."""
        mine = slice(layer * self._here, (layer + 1) * self._here)
        up = torch.bmm(tokens, self.segments["w13"][mine].transpose(1, 2))
        return torch.bmm(_gated(up), self.segments["w2"][mine].transpose(1, 2))


class NarrowExperts:
    """In float8, with a scale for each block of a matrix: a product a slot."""

    def __init__(self, place: Place, sizes: Dimensions, seed: int) -> None:
        count = sizes.layers * sizes.here
        draw = Draw(place, seed)
        w13, w13_scale = draw.narrow(count, 2 * sizes.intermediate, sizes.hidden)
        w2, w2_scale = draw.narrow(count, sizes.hidden, sizes.intermediate)
        self.segments = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
        self._here = sizes.here
        place.settle()
        self.way, self._multiply = multiplied(w2[0], w2_scale[0], sizes.rows)

    def apply(self, layer: int, tokens: Tensor) -> Tensor:
        """Slot by slot."""
        return torch.stack(
            [self._one(layer * self._here + place, rows) for place, rows in enumerate(tokens)]
        )

    def _one(self, slot: int, rows: Tensor) -> Tensor:
        segments = self.segments
        up = self._multiply(rows, segments["w13"][slot], segments["w13_scale"][slot])
        return self._multiply(_gated(up), segments["w2"][slot], segments["w2_scale"][slot])


KINDS: dict[str, Callable[[Place, Dimensions, int], Any]] = {
    BFLOAT16: WideExperts,
    FLOAT8: NarrowExperts,
}
"""By the name of a dtype."""


@dataclass
class Draw:
    """Random matrices on the device, from a seed, one matrix at a time."""

    place: Place
    seed: int

    def __post_init__(self) -> None:
        self._device = self.place.accelerator.device
        self._generator = torch.Generator(self._device).manual_seed(self.seed)

    def wide(self, count: int, outer: int, inner: int) -> Tensor:
        """bfloat16 [count, outer, inner], small enough that products stay about 1."""
        matrices = torch.empty((count, outer, inner), dtype=torch.bfloat16, device=self._device)
        for matrix in matrices:
            matrix.normal_(0.0, inner**-0.5, generator=self._generator)
        return matrices

    def narrow(self, count: int, outer: int, inner: int) -> tuple[Tensor, Tensor]:
        """float8 [count, outer, inner], and float32 [count, outer / 128, inner / 128]."""
        shape = (count, outer, inner)
        matrices = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self._device)
        for matrix in matrices:
            values = torch.randn((outer, inner), generator=self._generator, device=self._device)
            matrix.copy_(values)
        blocks = (count, outer // BLOCK, inner // BLOCK)
        scale = torch.rand(blocks, generator=self._generator, device=self._device)
        return matrices, (scale + 0.5) * inner**-0.5


def multiplied(matrix: Tensor, scale: Tensor, rows: int) -> tuple[str, Multiply]:
    """How to multiply by such matrices: scaled by the device where that works, and is right."""
    tokens = torch.ones((rows, matrix.shape[1]), dtype=torch.bfloat16, device=matrix.device)
    tokens[:, ::3] = -2.0
    expected = widened(tokens, matrix, scale)
    try:
        actual = scaled(tokens, matrix, scale)
    except (RuntimeError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0][:80]
        return f"widened slot by slot (scaled products: {why})", widened
    if (actual - expected).abs().max() > ROUGH * expected.abs().max():
        return "widened slot by slot (scaled products are wrong here)", widened
    return "products scaled by blocks", scaled


def scaled(tokens: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """By the device's own product of float8: a scale for 128 elements of a row, and for a block."""
    rows, inner = tokens.shape
    grouped = tokens.view(rows, inner // BLOCK, BLOCK).float()
    own = (grouped.abs().amax(dim=2) / LARGEST).clamp(min=1e-12)
    narrow = (grouped / own[:, :, None]).to(torch.float8_e4m3fn).view(rows, inner)
    return torch._scaled_mm(
        narrow,
        matrix.t(),
        scale_a=own.t().contiguous().t(),
        scale_b=scale.t(),
        out_dtype=torch.bfloat16,
    )


def widened(tokens: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    """The matrix in bfloat16, then a product."""
    outer, inner = matrix.shape
    blocks = matrix.view(outer // BLOCK, BLOCK, inner // BLOCK, BLOCK).to(torch.bfloat16)
    wide = blocks * scale[:, None, :, None].to(torch.bfloat16)
    return tokens @ wide.view(outer, inner).t()


def _gated(up: Tensor) -> Tensor:
    gate, value = up.chunk(2, dim=-1)
    return silu(gate) * value


SEED = 8
MATRICES = 4
"""Dense ones, used in turn: together they are far more than the device's cache holds."""
DENSE_ROWS = 64
TRIAL_ROUNDS = 4
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
        segments = self.experts.segments
        count = self.sizes.layers * self.sizes.here
        return tuple(
            tuple(Segment(name, tensor[slot]) for name, tensor in segments.items())
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
        top_hits = torch.topk(hits, self.sizes.rows, dim=1)
        tokens = top_hits.indices // self.sizes.top_k
        outputs = self.experts.apply(layer, self._hidden[tokens])
        weighted = outputs * top_hits.values[:, :, None].to(outputs.dtype)
        self._output.index_add_(0, tokens.view(-1), weighted.view(-1, self.sizes.hidden))

    def begin(self) -> None:
        """Clear what the step writes."""
        self._output.zero_()

    def fill_up(self) -> None:
        """The dense work of a step."""
        for turn in range(self.padding):
            self._product(turn)

    def fill_to(self, clock: Clock, seconds: float, bytes_: int, bare_seconds: float) -> None:
        """As many dense products that a step takes so long and reads so many bytes.

        Args:
            clock: of the stream that computes.
            seconds: at least.
            bytes_: at least.
            bare: seconds of a step without them.
        """

        def trial() -> None:
            for turn in range(TRIAL_ROUNDS * MATRICES):
                self._product(turn)

        for _ in range(2):  # the first one loads what it needs
            took = clock.span(lambda: clock.stream.launch(trial)) / (TRIAL_ROUNDS * MATRICES)
        self.padding = 0
        by_time = (seconds - bare_seconds) / took
        by_bytes = (bytes_ - self.traffic) / self._dense[0].nbytes
        self.padding = max(0, int(np.ceil(max(by_time, by_bytes))))

    def _product(self, turn: int) -> None:
        source, target = self._narrow[turn % 2], self._narrow[(turn + 1) % 2]
        torch.mm(source, self._dense[turn % MATRICES], out=target)


def even_ids(sizes: Dimensions) -> Sequence[np.ndarray]:
    """By layer, int32 [tokens, top_k]: different experts for each token, all equally likely."""
    rng = np.random.default_rng(SEED)
    scores = rng.random((sizes.layers, sizes.tokens, sizes.experts))
    return list(np.argsort(scores, axis=2)[:, :, : sizes.top_k].astype(np.int32))


class Library:
    """This rank's experts in page-locked host memory, as the start layout has them in its slots."""

    def __init__(self, model: Model) -> None:
        place, slots = model.place, model.slots
        self._here = model.sizes.here
        self._parts = [segment.type for segment in slots[0]]
        store = place.accelerator.slot_store(SlotLayout(slots, 0))
        pool = place.accelerator.host_pool(store.layout.slot_bytes, len(slots))
        sums = torch.empty(len(slots), dtype=torch.int64, device=place.accelerator.device)
        store.checksum_slots(range(len(slots)), sums, place.accelerator.stream(Role.COPY))
        place.settle()
        self._sums = [value & MASK64 for value in sums.tolist()]
        self._pages = [pool.take(DEADLINE) for _ in slots]
        for page, slot in zip(self._pages, slots, strict=True):
            pieces = page.data.split([segment.type.nbytes for segment in slot])
            for piece, segment in zip(pieces, slot, strict=True):
                piece.copy_(segment.bytes)

    def view(self, layer: int, expert: int) -> Sequence[Tensor]:
        """Its segments on the page."""
        page = self._pages[layer * self._here + expert].data
        pieces = page.split([kind.nbytes for kind in self._parts])
        return [
            piece.view(kind.dtype).view(kind.shape)
            for piece, kind in zip(pieces, self._parts, strict=True)
        ]

    def checksum(self, layer: int, expert: int) -> int:
        """As the device found it."""
        return self._sums[layer * self._here + expert]
