"""The shape of the model, and the rows of one forward."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the byte-level MoE decoder; the defaults are the shipped model's.

    `context` is the number of positions of a cache slot: prompt and new bytes together.
    Byte 0 never occurs in text, so it stands for "nothing before" in the embedding of the
    previous bytes.
    """

    layers: int = 6
    experts: int = 32
    top_k: int = 4
    hidden: int = 128
    heads: int = 4
    expert_width: int = 40
    context: int = 160
    vocabulary: int = 256
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden={self.hidden} must be heads={self.heads} of an even width")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must be 1 to experts={self.experts}")

    @property
    def head_width(self) -> int:
        """Numbers per attention head."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class Sequence:
    """Consecutive new tokens of one request.

    `slot` is the request's slot in the cache, `tokens` are (T,) int64 or uint8, `start` is the
    position of the first of them: how many tokens of the request the cache holds already.
    """

    slot: int
    tokens: Tensor
    start: int


@dataclass(frozen=True)
class Batch:
    """The rows of one forward: prefill sequences first, then one row per decode sequence.

    Every sequence of `decode` has exactly one token; a slot occurs once in a batch. Raises
    ValueError otherwise.
    """

    prefill: tuple[Sequence, ...] = ()
    decode: tuple[Sequence, ...] = ()

    def __post_init__(self) -> None:
        slots = [sequence.slot for sequence in self]
        if len(set(slots)) != len(slots):
            raise ValueError(f"a cache slot occurs twice in one batch: {sorted(slots)}")
        for sequence in self.prefill:
            if len(sequence.tokens) < 1:
                raise ValueError(f"the prefill sequence of slot {sequence.slot} has no token")
        for sequence in self.decode:
            if len(sequence.tokens) != 1:
                raise ValueError(f"the decode sequence of slot {sequence.slot} has not one token")

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.prefill
        yield from self.decode

    @property
    def rows(self) -> int:
        """Tokens in the batch."""
        return sum(len(sequence.tokens) for sequence in self)
