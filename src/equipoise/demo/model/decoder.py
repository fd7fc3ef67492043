"""The decoder: embedding, layers of attention and experts, head."""

from torch import Tensor

from equipoise.demo.model.attention import RowPlan, attend, plan_rows
from equipoise.demo.model.config import Batch
from equipoise.demo.model.experts import MoeLayer
from equipoise.demo.model.kv_cache import KVCache
from equipoise.demo.model.layers import Rotary, rms_norm, rotate, route
from equipoise.demo.model.rows import pad_rows, product
from equipoise.demo.model.weights import ModelWeights


class Decoder:
    """The model without its experts, which the caller brings as a `MoeLayer`.

    `forward` is all of it; a pipeline stage calls `embed`, `run_layers` and `head` itself. On
    one thread the bits of a row depend on its request alone, not on the batch it travels in.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._rotary = Rotary(weights.config, weights.device)

    def forward(self, batch: Batch, cache: KVCache, moe: MoeLayer) -> Tensor:
        """Logits (rows, 256) float32 of every row, prefill rows first; advances the cache.

        `moe` is called once per layer, also when the batch has no row. ValueError where a
        sequence does not fit the cache.
        """
        plan = plan_rows(batch, cache)
        x = self.embed(plan, cache)
        x = self.run_layers(range(self._weights.config.layers), x, plan, cache, moe)
        return self.head(x)

    def embed(self, plan: RowPlan, cache: KVCache) -> Tensor:
        """(rows, hidden): the byte and the two before it, embedded and added."""
        now, before, earlier = cache.remember(plan.slots, plan.positions, plan.tokens)
        embed = self._weights.embed
        return embed[0][now] + embed[1][before] + embed[2][earlier]

    def run_layers(
        self, layers: range, x: Tensor, plan: RowPlan, cache: KVCache, moe: MoeLayer
    ) -> Tensor:
        """The residual stream (rows, hidden) after the given layers."""
        for layer in layers:
            x = x + self._attention(layer, x, plan, cache)
            x = x + self._experts(layer, x, moe)
        return x

    def head(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> logits (rows, 256)."""
        weights = self._weights
        normal = rms_norm(pad_rows(x), weights.final_norm, weights.config.norm_epsilon)
        return product(normal, weights.head)[: x.shape[0]]

    def _attention(self, layer: int, x: Tensor, plan: RowPlan, cache: KVCache) -> Tensor:
        weights, config = self._weights, self._weights.config
        normal = rms_norm(pad_rows(x), weights.attention_norm[layer], config.norm_epsilon)
        qkv = product(normal, weights.qkv[layer])[: x.shape[0]]
        qkv = qkv.view(-1, 3, config.heads, config.head_width).transpose(0, 1).contiguous()
        cos, sin = self._rotary.angles(plan.positions)
        qkv[:2] = rotate(qkv[:2], cos, sin)
        attention = attend(layer, qkv, plan, cache)
        return product(pad_rows(attention), weights.out[layer])[: x.shape[0]]

    def _experts(self, layer: int, x: Tensor, moe: MoeLayer) -> Tensor:
        weights, config = self._weights, self._weights.config
        normal = rms_norm(pad_rows(x), weights.expert_norm[layer], config.norm_epsilon)
        ids, gates = route(normal, weights.router[layer], config.top_k)
        rows = x.shape[0]
        return moe(layer, normal[:rows], ids[:rows], gates[:rows])
