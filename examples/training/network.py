"""The same model with gradients: whole windows at once, on any number of threads."""

from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from equipoise.demo.model.config import ModelConfig
from equipoise.demo.model.experts import group_by_expert
from equipoise.demo.model.layers import Rotary, rms_norm, rotate
from equipoise.demo.model.weights import ModelWeights, random_weights, tensor_shapes


class Network(nn.Module):
    """Parameters named and shaped as `ModelWeights`; `forward` gives logits and auxiliary loss."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        initial = random_weights(config, seed)
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(getattr(initial, name)) for name in tensor_shapes(config)}
        )
        self._rotary = Rotary(config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`tokens` (batch, T) int64 -> logits (batch, T, 256), balance loss of all layers."""
        weights, config = self.weights, self.config
        layers = {name: weights[name].unbind(0) for name in _LAYERED}
        x, balance = self._embed(tokens), torch.zeros(())
        for layer in range(config.layers):
            own = {name: parts[layer] for name, parts in layers.items()}
            x = x + self._attention(own, x)
            normal = rms_norm(x, own["expert_norm"], config.norm_epsilon).flatten(0, 1)
            out, loss = self._experts(own, normal)
            x, balance = x + out.view_as(x), balance + loss
        normal = rms_norm(x, weights["final_norm"], config.norm_epsilon)
        return normal @ weights["head"], balance / config.layers

    def _embed(self, tokens: Tensor) -> Tensor:
        embed = self.weights["embed"]
        total: Tensor = embed[0][tokens]
        for back in (1, 2):
            total = total + embed[back][F.pad(tokens, (back, 0))[:, :-back]]
        return total

    def _attention(self, own: dict[str, Tensor], x: Tensor) -> Tensor:
        config, (batch, length, hidden) = self.config, x.shape
        qkv = rms_norm(x, own["attention_norm"], config.norm_epsilon) @ own["qkv"]
        query, key, value = qkv.view(batch, length, 3, config.heads, -1).unbind(2)
        cos, sin = self._rotary.angles(torch.arange(length))
        query, key, value = (
            t.transpose(1, 2) for t in (rotate(query, cos, sin), rotate(key, cos, sin), value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, hidden) @ own["out"]

    def _experts(self, own: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        probabilities = torch.softmax(x @ own["router"], dim=-1)
        gates, ids = probabilities.topk(config.top_k, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        order, bounds = group_by_expert(ids, config.experts)
        sizes = [stop - start for start, stop in pairwise(bounds)]
        parts = torch.split(x[order // config.top_k], sizes)
        stacks = zip(parts, own["gate_up"].unbind(0), own["down"].unbind(0), strict=True)
        rows = torch.cat([_expert(*stack) for stack in stacks])
        weighted = rows * gates.flatten()[order, None]
        out = torch.zeros_like(x).index_add(0, order // config.top_k, weighted)
        row_shares = torch.tensor(sizes) / ids.numel()
        return out, config.experts * (row_shares * probabilities.mean(0)).sum()


_LAYERED = ("attention_norm", "qkv", "out", "expert_norm", "router", "gate_up", "down")


def _expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down


def rounded(network: Network) -> ModelWeights:
    """The weights as they will be shipped: rounded to bfloat16, held in float32."""
    tensors = {name: value.detach().bfloat16().float() for name, value in network.weights.items()}
    return ModelWeights(config=network.config, **tensors)


def save_weights(weights: ModelWeights, path: Path, notes: dict[str, str]) -> None:
    """Write them as bfloat16 safetensors; `notes` become the file's metadata."""
    tensors = {name: getattr(weights, name).bfloat16() for name in tensor_shapes(weights.config)}
    save_file(tensors, path, metadata=notes)
