"""The shipped weights: what they are, and that they have learnt the text they serve."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from equipoise.demo.model import (
    Batch,
    Decoder,
    KVCache,
    LocalExperts,
    ModelConfig,
    ModelWeights,
    Sequence,
    load_weights,
    random_weights,
)
from equipoise.demo.model.weights import metadata, shipped_bytes, tensor_shapes, weights_from
from equipoise.demo.traffic import shipped_phase

KINDS = ("python", "english", "chinese", "tables")
SAMPLE = 8 * 1024
WINDOWS = 8


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def packaged_weights() -> ModelWeights:
    return load_weights()


def bits_per_byte(text: bytes) -> float:
    """As served: prompts of one context, from nothing, 8 at a time."""
    weights = packaged_weights()
    decoder, experts = Decoder(weights), LocalExperts(weights)
    store, context = KVCache(weights.config, WINDOWS), weights.config.context
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokens = tokens[: len(tokens) // (WINDOWS * context) * WINDOWS * context]
    nats = []
    for group in tokens.view(-1, WINDOWS, context):
        batch = Batch(tuple(Sequence(slot, window, 0) for slot, window in enumerate(group)))
        logits = decoder.forward(batch, store, experts).view(WINDOWS, context, -1)
        nats.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), group[:, 1:].flatten()))
    return float(torch.stack(nats).mean()) / math.log(2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_shipped_weights_need_below_2_4_bits_per_byte(kind: str) -> None:
    text = shipped_phase(kind).text
    middle = len(text) // 2
    sample = text[: SAMPLE // 2] + text[middle : middle + SAMPLE // 2]
    assert bits_per_byte(sample) < 2.4


def test_shipped_weights_file_size_and_metadata() -> None:
    blob = shipped_bytes()
    notes = metadata(blob)
    assert len(blob) < 8_000_000
    assert notes["license"] == "Apache-2.0"
    assert "ORIGINS.md" in notes["sources"]
    assert "train_model.py" in notes["training"]
    assert ModelConfig(**json.loads(notes["config"])) == packaged_weights().config == ModelConfig()
    bits_by_kind = json.loads(notes["bits_per_byte"])
    assert set(bits_by_kind) == set(KINDS)
    assert max(bits_by_kind.values()) < 2.4


def test_shipped_weights_are_exact_bfloat16_values() -> None:
    weights = packaged_weights()
    for name in tensor_shapes(weights.config):
        tensor = getattr(weights, name)
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        assert torch.equal(tensor, tensor.bfloat16().float())


def test_random_weights_are_a_pure_function_of_the_seed() -> None:
    config = ModelConfig(layers=1, experts=4)
    one, same, other = (random_weights(config, seed) for seed in (3, 3, 4))
    assert torch.equal(one.gate_up, same.gate_up)
    assert not torch.equal(one.gate_up, other.gate_up)


def test_weights_errors_name_missing_or_misshapen_tensor() -> None:
    config = ModelConfig(layers=1, experts=4)
    weights = random_weights(config, 0)
    tensors = {name: getattr(weights, name) for name in tensor_shapes(config)}
    with pytest.raises(ValueError, match="weight router is"):
        replace(weights, router=weights.router[:, :5])
    del tensors["down"]
    with pytest.raises(ValueError, match="weights lack down"):
        weights_from(tensors, config)


def test_model_config_rejects_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="hidden=100"):
        ModelConfig(hidden=100, heads=3)
    with pytest.raises(ValueError, match="top_k=5"):
        ModelConfig(experts=4, top_k=5)
