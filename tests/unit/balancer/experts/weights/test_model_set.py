"""Several models on one rank."""

import pytest
import torch
from torch import Tensor

from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal.errors import RegistrationError


def model(name: str, weights: Tensor, number: int = 0) -> ExpertModel:
    registry = ModelRegistry(name, weights.shape[0], 4)
    registry.register(number, w=weights)
    return registry.finalize([("w", weights)])


def test_model_set_finds_models_by_name() -> None:
    target, draft = model("target", torch.zeros(2, 3)), model("draft", torch.zeros(4, 1))
    both = ModelSet((target, draft))
    assert (both["draft"], list(both), len(both)) == (draft, [target, draft], 2)
    assert both.nbytes == target.nbytes + draft.nbytes
    assert both.describe() == f"{target.describe()}\n{draft.describe()}"
    with pytest.raises(RegistrationError, match="no model is named 'other'; there are: target, dr"):
        both["other"]


def test_model_set_refuses_duplicate_names() -> None:
    with pytest.raises(RegistrationError, match="two models are named 'm'"):
        ModelSet((model("m", torch.zeros(2, 3)), model("m", torch.zeros(2, 3))))


def test_model_set_refuses_shared_weights() -> None:
    weights = torch.zeros(3, 5)
    message = (
        r"model 'draft', layer 9, tensor 'w': slot 0 shares memory with model 'target', layer 7"
    )
    with pytest.raises(RegistrationError, match=message):
        ModelSet((model("target", weights[:2], 7), model("draft", weights[1:], 9)))


def test_model_set_refuses_no_models() -> None:
    with pytest.raises(RegistrationError, match="there is no model to balance"):
        ModelSet(())
