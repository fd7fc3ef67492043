"""The shipped byte-level MoE language model, run so that a row's bits never depend on its batch."""

from equipoise.demo.model.config import HOST, Batch, ModelConfig, Sequence
from equipoise.demo.model.decoder import Decoder
from equipoise.demo.model.experts import (
    LocalExperts,
    MoeLayer,
    combine_in_order,
    expert_rows,
    group_by_expert,
)
from equipoise.demo.model.kv_cache import KVCache
from equipoise.demo.model.weights import ModelWeights, load_weights, random_weights

__all__ = [
    "HOST",
    "Batch",
    "Decoder",
    "KVCache",
    "LocalExperts",
    "ModelConfig",
    "ModelWeights",
    "MoeLayer",
    "Sequence",
    "combine_in_order",
    "expert_rows",
    "group_by_expert",
    "load_weights",
    "random_weights",
]
