"""One set of buffers, for one micro-batch in flight."""

from dataclasses import dataclass

from torch import Tensor

from equipoise.pipeline.expert_exchange.arrivals import Arrivals


@dataclass(frozen=True, eq=False)
class Room:
    """What an exchange's callers see of a set of buffers; addresses never change.

    Attributes:
        number: of the room.
        arrivals: what `unpack_rows` fills.
        results: [max_tokens, top_k, ...], what `unpack_results` fills.
        words: int64, see `equipoise.pipeline.expert_exchange.words`.
    """

    number: int
    arrivals: Arrivals
    results: Tensor
    words: Tensor
