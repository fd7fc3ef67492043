"""What is registered, held against what a model holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.balancer.experts.weights.completeness import model_tensors
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.experts.weights.registry import ModelRegistry, RegistryOpen
from equipoise.hal.errors import ModelIncomplete, RegistrationError

SLOTS, EXPERTS, HIDDEN, WIDTH = 3, 10, 6, 4
ROUTER = {"*.gate.weight": "the router's, by logical expert"}


class FusedExperts(nn.Module):
    """Stacked weights in fp8 with a scale an expert, as fused kernels want them."""

    def __init__(self) -> None:
        super().__init__()
        fp8 = torch.float8_e4m3fn
        self.w13 = _frozen(torch.zeros(SLOTS, 2 * WIDTH, HIDDEN).to(fp8))
        self.w2 = _frozen(torch.zeros(SLOTS, HIDDEN, WIDTH).to(fp8))
        self.w13_scale = _frozen(torch.ones(SLOTS, 2))
        self.w2_scale = _frozen(torch.ones(SLOTS))
        self.alpha = self.w13_scale[:, 0] * 2
        self.register_buffer("expert_map", torch.zeros(EXPERTS, dtype=torch.int32))


class PackedExperts(nn.Module):
    """Two int4 values a byte, a scale and a zero point for every group of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.qweight = _frozen(torch.zeros(SLOTS, WIDTH, HIDDEN // 2, dtype=torch.uint8))
        self.scales = _frozen(torch.zeros(SLOTS, 2, WIDTH, dtype=torch.bfloat16).transpose(1, 2))
        self.qzeros = [torch.zeros(WIDTH, 1, dtype=torch.uint8) for _ in range(SLOTS)]


class Expert(nn.Module):
    """One expert as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, WIDTH)
        self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False)


class Block(nn.Module):
    """A layer with a router, a norm and experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts


def _frozen(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


def modular_model(layers: int) -> nn.ModuleDict:
    experts = [nn.ModuleList(Expert() for _ in range(SLOTS)) for _ in range(layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(Block(each) for each in experts)})


def fused_model(layers: int) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleList(Block(FusedExperts()) for _ in range(layers))})


def registry() -> ModelRegistry:
    return ModelRegistry("m", SLOTS, EXPERTS)


def register_modular(model_registry: ModelRegistry, model: nn.Module, *left_out: str) -> None:
    for number, block in enumerate(model.get_submodule("layers").children()):
        experts = [dict(expert.named_parameters()) for expert in block.experts.children()]  # type: ignore[union-attr]
        names = [name for name in experts[0] if name not in left_out]
        model_registry.register(
            number, {name: [expert[name] for expert in experts] for name in names}
        )


def register_fused(model_registry: ModelRegistry, model: nn.Module, *left_out: str) -> None:
    for number, block in enumerate(model.get_submodule("layers").children()):
        tensors = tensors_of(block.get_submodule("experts"))
        model_registry.register(number, {n: t for n, t in tensors.items() if n not in left_out})


def tensors_of(experts: nn.Module) -> dict[str, Tensor]:
    assert isinstance(experts.alpha, Tensor)
    return {**dict(experts.named_parameters()), "alpha": experts.alpha}


def incomplete_error(
    model_registry: ModelRegistry, model: object, **ignore: str
) -> ModelIncomplete:
    with pytest.raises(ModelIncomplete) as error:
        model_registry.finalize(model, {**ROUTER, "*.expert_map": "a map of ids", **ignore})  # type: ignore[arg-type]
    assert isinstance(model_registry.state, RegistryOpen)
    return error.value


def finalize_model(model_registry: ModelRegistry, model: nn.Module) -> ExpertModel:
    return model_registry.finalize(model, {**ROUTER, "*.expert_map": "a map of ids"})


FUSED = ("w13", "w2", "w13_scale", "w2_scale", "alpha")


@given(st.sets(st.sampled_from(FUSED), max_size=4), st.integers(1, 4))
def test_finalize_names_every_missing_tensor_of_fused_model(
    left_out: set[str], layers: int
) -> None:
    model, model_registry = fused_model(layers), registry()
    register_fused(model_registry, model, *left_out)
    if not left_out:
        assert finalize_model(model_registry, model).layers == layers
        return
    error = incomplete_error(model_registry, model)
    assert set(error.missing) == {
        f"layers.{layer}.experts.{name}" for layer in range(layers) for name in left_out
    }
    assert error.unexpected == ()
    assert len(str(error).splitlines()) == 1 + layers * len(left_out)


MODULAR = ("w1.weight", "w1.bias", "w2.weight")


@given(st.sets(st.sampled_from(MODULAR), max_size=2), st.integers(1, 4))
def test_finalize_names_every_missing_tensor_of_expert_list(
    left_out: set[str], layers: int
) -> None:
    model, model_registry = modular_model(layers), registry()
    register_modular(model_registry, model, *left_out)
    if not left_out:
        assert finalize_model(model_registry, model).layers == layers
        return
    assert set(incomplete_error(model_registry, model).missing) == {
        f"layers.{layer}.experts.{slot}.{name}"
        for layer in range(layers)
        for slot in range(SLOTS)
        for name in left_out
    }


def test_finalize_reports_dtype_and_shape_of_missing_tensor() -> None:
    model, model_registry = fused_model(1), registry()
    register_fused(model_registry, model, "w2", "w13_scale")
    lines = str(incomplete_error(model_registry, model)).splitlines()
    assert lines == [
        "model 'm': its experts are not registered as it holds them",
        "  layers.0.experts.w2 float8_e4m3fn [3, 6, 4] is not registered",
        "  layers.0.experts.w13_scale float32 [3, 2] is not registered",
    ]


def test_finalize_accepts_packed_weights_with_scales_and_zero_points() -> None:
    experts, model_registry = PackedExperts(), registry()
    model_registry.register(0, qweight=experts.qweight, scales=experts.scales)
    error = incomplete_error(model_registry, nn.ModuleDict({"experts": experts}))
    assert error.missing == ("experts.qzeros.0", "experts.qzeros.1", "experts.qzeros.2")
    model_registry = registry()
    model_registry.register(
        0, qweight=experts.qweight, scales=experts.scales, qzeros=experts.qzeros
    )
    model = model_registry.finalize(experts)
    assert [(kind.name, kind.shape) for kind in model.groups[0].descriptor] == [
        ("qweight", (WIDTH, HIDDEN // 2)),
        ("qzeros", (WIDTH, 1)),
        ("scales", (2, WIDTH)),
    ]


def test_finalize_names_tensors_of_unregistered_layer() -> None:
    model, model_registry = fused_model(2), registry()
    model_registry.register(0, tensors_of(_experts(model, 0)))
    assert set(incomplete_error(model_registry, model).missing) == {
        f"layers.1.experts.{name}" for name in FUSED
    }


def _experts(model: nn.Module, layer: int) -> nn.Module:
    return model.get_submodule(f"layers.{layer}.experts")


def test_finalize_accepts_as_many_layers_as_slots() -> None:
    for make, register in ((fused_model, register_fused), (modular_model, register_modular)):
        model, model_registry = make(SLOTS), registry()
        register(model_registry, model)
        assert finalize_model(model_registry, model).layers == SLOTS


def test_finalize_reports_partly_registered_tensor() -> None:
    model, model_registry = fused_model(1), registry()
    tensors = tensors_of(_experts(model, 0))
    one, two, _ = tensors.pop("w2_scale")
    model_registry.register(0, tensors, w2_scale=[one, two, torch.zeros(())])
    message = str(incomplete_error(model_registry, model))
    assert "layers.0.experts.w2_scale float32 [3] is not registered (8 of 12 bytes are)" in message


def test_finalize_names_registered_copy_as_unknown_to_model() -> None:
    model, model_registry = fused_model(1), registry()
    tensors = tensors_of(_experts(model, 0))
    model_registry.register(0, {**tensors, "w2": tensors["w2"].clone()})
    error = incomplete_error(model_registry, model)
    assert (error.missing, error.unexpected) == (
        ("layers.0.experts.w2",),
        ("layer 0, tensor 'w2'",),
    )
    assert "layer 0, tensor 'w2' is registered, but the model does not hold it" in str(error)


def test_finalize_names_registered_tensor_unknown_to_complete_model() -> None:
    model, model_registry = fused_model(1), registry()
    model_registry.register(0, tensors_of(_experts(model, 0)), derived=torch.ones(SLOTS))
    error = incomplete_error(model_registry, model)
    assert (error.missing, error.unexpected) == ((), ("layer 0, tensor 'derived'",))


def test_registry_accepts_missing_layer_after_failed_finalize() -> None:
    model, model_registry = fused_model(2), registry()
    for layer in range(2):
        model_registry.register(layer, tensors_of(_experts(model, layer)))
        if layer == 0:
            incomplete_error(model_registry, model)
    assert finalize_model(model_registry, model).layers == 2


def test_finalize_notes_ignored_tensors_with_reasons() -> None:
    model, model_registry = fused_model(1), registry()
    register_fused(model_registry, model)
    expert_model = model_registry.finalize(
        model, {**ROUTER, "*map": "a map of ids", "*.bias": "none", "*": "no"}
    )
    assert expert_model.notes == (
        "layers.0.gate.weight float32 [10, 6] stays: the router's, by logical expert",
        "layers.0.experts.expert_map int32 [10] stays: a map of ids",
        "ignored pattern '*.bias' matches nothing that is left out",
    )
    assert [line.removeprefix("m: ") for line in expert_model.describe().splitlines()[-3:]] == list(
        expert_model.notes
    )


def test_finalize_reports_unused_ignore_pattern() -> None:
    model, model_registry = fused_model(1), registry()
    register_fused(model_registry, model, "w2")
    message = str(incomplete_error(model_registry, model, **{"*.w3": "forgotten"}))
    assert "ignored pattern '*.w3' matches nothing that is left out" in message


def test_finalize_refuses_ignore_pattern_without_reason() -> None:
    model_registry = registry()
    model_registry.register(0, w=torch.zeros(SLOTS, 2))
    with pytest.raises(RegistrationError, match=r"ignoring '\*' needs a reason"):
        model_registry.finalize([], {"*": " "})


def test_finalize_accepts_other_names_of_registered_memory() -> None:
    weights, model_registry = torch.zeros(SLOTS, 4, 2), registry()
    model_registry.register(0, w=weights)
    aliases = {"a": weights, "b": weights.view(SLOTS, 8), "c": weights.view(torch.uint8)[1]}
    assert model_registry.finalize([*aliases.items(), ("d", weights.transpose(1, 2))]).notes == ()


def test_finalize_finds_missing_tensor_with_one_slot_per_rank() -> None:
    expert = Expert()
    model_registry = ModelRegistry("m", 1, EXPERTS)
    model_registry.register(0, w1=[expert.w1.weight])
    model = nn.ModuleDict({"experts": nn.ModuleList([expert])})
    assert set(incomplete_error(model_registry, model).missing) == {
        "experts.0.w1.bias",
        "experts.0.w2.weight",
    }


class MixedTensors(nn.Module):
    """Holds tensors wherever a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.lazy = nn.UninitializedParameter()
        self.nothing = torch.zeros(0, 3)
        self.loose = torch.zeros(3)
        self.listed = [torch.zeros(4), "word"]
        self.mapped = {"scale": torch.zeros(5)}
        self.register_buffer("state", torch.zeros(6), persistent=False)
        self.register_buffer("absent", None)
        self.inner = nn.Linear(2, 2, bias=False)


def test_held_tensors_finds_parameters_buffers_and_plain_tensors() -> None:
    shapes = {tensor.name: list(tensor.tensor.shape) for tensor in model_tensors(MixedTensors())}
    assert shapes == {
        "weight": [2],
        "state": [6],
        "loose": [3],
        "listed.0": [4],
        "mapped.scale": [5],
        "inner.weight": [2, 2],
    }


def test_held_tensors_finds_inner_tensor_of_wrapper_subclass() -> None:
    class Wrapper(Tensor):
        kept: Tensor

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["kept"], None

    wrapper = torch.zeros(2).as_subclass(Wrapper)
    wrapper.kept = torch.zeros(7)
    (one,) = model_tensors([("w", wrapper)])
    assert (one.name, str(one)) == ("w.kept", "w.kept float32 [7]")


def test_held_tensors_lists_shared_parameter_under_both_names() -> None:
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    names = [tensor.name for tensor in model_tensors(nn.ModuleList([one, two]))]
    assert names == ["0.weight", "1.weight"]


def test_finalize_finds_weights_replaced_after_registration() -> None:
    model, model_registry = fused_model(1), registry()
    register_fused(model_registry, model)
    experts = _experts(model, 0)
    experts.get_parameter("w2").data = torch.zeros(SLOTS, HIDDEN, WIDTH)
    error = incomplete_error(model_registry, model)
    assert error.missing == ("layers.0.experts.w2",)
    assert error.unexpected == ("layer 0, tensor 'w2'",)
