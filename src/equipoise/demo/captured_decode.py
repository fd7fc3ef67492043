"""Decoding as one captured graph: a replay is a token of every request, and the host only launches.

Everything that a step needs is on the device and stays where it is: the tokens it begins with are
those that the last one chose. The experts are this rank's slots, all of which compute every row,
so that no shape depends on what the router chose; which of the results counts, the routing tables
say. So a commit between two replays moves experts under a graph that knows nothing of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise.balancer.experts.routing.routers import Router
from equipoise.demo.expert_parallel import SlotWeights
from equipoise.demo.model import Decoder, KVCache, ModelWeights, MoeLayer, combine_in_order
from equipoise.demo.model.attention import RowPlan
from equipoise.demo.model.experts import expert_rows
from equipoise.demo.model.kv_cache import SLOT_BLOCK
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.stream import Role


class AllSlotsMoe:
    """A `MoeLayer` of one rank that holds every slot; no shape depends on the choice of experts.

    Args:
        router: chooses a slot for every (token, k).
        weights: of all slots.
    """

    def __init__(self, router: Router, weights: SlotWeights) -> None:
        self._router = router
        self._weights = weights

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `equipoise.demo.model.MoeLayer`."""
        slots = self._router.route(layer, 0, expert_ids).long()
        slot_weights = zip(self._weights.gate_up[layer], self._weights.down[layer], strict=True)
        slot_outputs = torch.stack(
            [expert_rows(x, gate_up, down) for gate_up, down in slot_weights]
        )
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return combine_in_order(slot_outputs[slots, rows], gates)


class CapturedDecode:
    """Greedy decoding of the same requests, step by step, by replays of one graph.

    Captured with the first step; the contents of the cache and of `tokens` by then are kept.

    Args:
        accelerator: captures graphs (capability `graph_capture`).
        weights: of the model, on its device.
        cache: holds what came before.
        moe: launches on the compute stream, and may be captured: it reads nothing back.
        requests: slots of the cache, each once.

    Raises:
        Unsupported: the accelerator captures no graph.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        weights: ModelWeights,
        cache: KVCache,
        moe: MoeLayer,
        requests: Sequence[int],
    ) -> None:
        self._stream = accelerator.stream(Role.COMPUTE)
        self._graph = accelerator.graph()
        self._decoder = Decoder(weights)
        self._layers = range(weights.config.layers)
        self._cache = cache
        self._moe = moe
        self._plan = _plan(requests, cache.device)
        shape = (len(requests), weights.config.vocabulary)
        self._logits = torch.zeros(shape).to(cache.device)
        self._captured = False

    @property
    def tokens(self) -> Tensor:
        """What the next step begins with, int64 [requests]; the caller writes the first ones."""
        return self._plan.tokens

    @property
    def positions(self) -> Tensor:
        """Positions of these tokens, int64 [requests]; likewise."""
        return self._plan.positions

    @property
    def logits(self) -> Tensor:
        """Of the last step, float32 [requests, vocabulary]."""
        return self._logits

    def step(self) -> None:
        """One token of each request; launched, not awaited."""
        if not self._captured:
            self._graph.capture(self._stream, lambda: self._stream.launch(self._step))
            self._captured = True
        self._graph.replay(self._stream)

    def _step(self) -> None:
        plan, cache = self._plan, self._cache
        x = self._decoder.embed(plan, cache)
        x = self._decoder.run_layers(self._layers, x, plan, cache, self._moe)
        self._logits.copy_(self._decoder.head(x))
        plan.tokens.copy_(self._logits.max(dim=-1).indices)
        plan.positions.add_(1)


def _plan(requests: Sequence[int], device: torch.device) -> RowPlan:
    """One row a request, of persistent tensors."""

    def zeros() -> Tensor:
        return torch.zeros(len(requests), dtype=torch.int64).to(device)

    return RowPlan(
        tokens=zeros(),
        slots=torch.tensor(list(requests), dtype=torch.int64).to(device),
        positions=zeros(),
        spans=(),
        decode_first=0,
        decode_blocks=tuple(sorted({slot // SLOT_BLOCK for slot in requests})),
    )
