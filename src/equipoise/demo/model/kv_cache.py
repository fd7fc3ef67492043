"""Keys, values and tokens of the requests in flight."""

import torch
from torch import Tensor

from equipoise.demo.model.config import HOST, ModelConfig
from equipoise.demo.model.rows import padded_count

SLOT_BLOCK = 8
"""Decode attention works on this many neighbouring slots at a time, in use or not."""

LOOK_BACK = 2
"""How many previous bytes the embedding sees."""


class KVCache:
    """A fixed number of request slots x `config.context` positions, allocated once.

    `keys[layer]` (slots, heads, head_width, context) and `values[layer]` (slots, heads, context,
    head_width) float32; keys are stored transposed, since products want [in, out]. `history`
    (slots, LOOK_BACK + context) int64 holds the bytes themselves after `LOOK_BACK` zeros.
    A slot needs no clearing between requests: positions not yet written are masked.
    `slots` is rounded up to a multiple of `SLOT_BLOCK`. Raises ValueError for slots < 1.

    Zeroed on the host, whatever the `device`: so it is, for whichever stream comes first.
    """

    def __init__(self, config: ModelConfig, slots: int, device: torch.device = HOST) -> None:
        if slots < 1:
            raise ValueError(f"a cache needs at least one slot, not {slots}")
        self.config = config
        self.slots = padded_count(slots)
        shape = (config.layers, self.slots, config.heads)
        width, context = config.head_width, config.context
        self.keys = list(torch.zeros(*shape, width, context).to(device))
        self.values = list(torch.zeros(*shape, context, width).to(device))
        self.history = torch.zeros(self.slots, LOOK_BACK + context, dtype=torch.int64).to(device)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.history.device

    def remember(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """Store the tokens, and return each with its predecessors: (3, N) int64, itself first.

        `slots`, `positions`, `tokens` are (N,) int64.
        """
        self.history[slots, positions + LOOK_BACK] = tokens
        back = [self.history[slots, positions + LOOK_BACK - i] for i in range(LOOK_BACK + 1)]
        return torch.stack(back)
