"""Reads a vLLM model: which tensors are expert weights, and which expert is in which slot.

vLLM lists the weights of an expert (`get_expert_weights`) and moves no others. The tensors that are
not on the list are checked here, those of the experts' modules and those that their kernels hold: a
scale that was derived while loading and does not move with its expert would make outputs wrong from
the first rebalance on.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.balancer.experts.placement import Layout, even_shares
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal.errors import IntegrationError

SHARED_SCALES = ("w13_input_scale", "w2_input_scale")
"""Not on vLLM's list, since in most formats they repeat one value for all experts."""
ACTIVATION_SCALES = ("_a1", "_a2")
"""Parts of what a kernel is configured with, which vLLM derives from those."""
WEIGHT_SCALES = ("_w1", "_w2")
KERNEL_PARTS = ("experts", "fallback_experts")
"""Of a kernel that chooses between two."""
MAX_CONSTANTS = 64
"""Most values of a slot that are compared: larger tensors hold weights or scales."""


def shared_scales(model: Any) -> list[tuple[str, Tensor]]:
    """Return the scales that must be equal for all experts, by name; the same names on all
    ranks."""
    found = []
    for number, layer in enumerate(model.moe_layers):
        experts = layer.routed_experts
        named = [(name, getattr(experts, name, None)) for name in SHARED_SCALES]
        for name, tensor in (*named, *_configured_tensors(experts, ACTIVATION_SCALES)):
            if isinstance(tensor, Tensor) and tensor.numel():
                found.append((f"layers.{number}.{name}", tensor))
    return found


def check_shared_scales(scales: Sequence[tuple[str, Tensor]], group: Any) -> None:
    """Check that each scale has one value on all ranks; collective, on the host.

    Some NVFP4 kernels keep a scale per expert and fold it into weights that do move: a moved expert
    would be scaled by another expert's value.

    Args:
        scales: from `shared_scales`.
        group: process group of the expert-parallel ranks for host tensors.

    Raises:
        IntegrationError: names the scales that differ; on every rank.
    """
    if not scales:
        return
    values = [tensor.detach().double().flatten().cpu() for _, tensor in scales]
    ends = torch.stack([torch.stack([value.max(), -value.min()]) for value in values])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    differing = [name for (name, _), (high, low) in zip(scales, ends, strict=True) if high != -low]
    if differing:
        raise IntegrationError(f"scales differ among experts, and would not move: {differing}")


NOT_EXPERT_WEIGHTS = {
    "*expert_map*": "which slots are here: the same for every expert",
    "*e_score_correction_bias": "the router's, by logical expert",
    "*w13_input_scale": "one for all experts, repeated",
    "*w2_input_scale": "one for all experts, repeated",
    "*quant_config._a[12].*": "of activations: one for all experts, repeated",
    "*hash_indices_table": "the router's",
    "*expert_load*": "counts, by slot",
    "*logical_to_physical_map": "the engine's own table",
    "*logical_replica_count": "the engine's own table",
}
"""Tensors that have the shape of expert weights, and why they do not move."""


def expert_model(model: Any, name: str, device: torch.device) -> ExpertModel:
    """Return the expert weights of a loaded model.

    Args:
        model: implements vLLM's protocol `MixtureOfExperts`; `expert_weights[layer]` are the
            tensors of a layer, each [slots of this rank, ...].
        name: unique among the models of the engine.
        device: of the weights.

    Raises:
        IntegrationError: a layer routes without mapping experts to slots.
        RegistrationError: a tensor cannot be moved slot by slot.
        ModelIncomplete: a tensor that would have to move is not on vLLM's list.
    """
    registry = ModelRegistry(
        name, model.num_local_physical_experts, model.num_logical_experts, device=device
    )
    for number, (layer, weights) in enumerate(
        zip(model.moe_layers, model.expert_weights, strict=True)
    ):
        _check(number, layer)
        registry.register(number, {f"weight {at}": tensor for at, tensor in enumerate(weights)})
    return registry.finalize(expert_tensors(model), ignore=NOT_EXPERT_WEIGHTS)


def expert_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the experts' modules, and those that their kernels hold."""
    for number, layer in enumerate(model.moe_layers):
        experts = layer.routed_experts
        for path, module in experts.named_modules():
            prefix = ".".join(filter(None, (f"layers.{number}", path)))
            for own in (module._parameters, module._buffers, vars(module)):
                yield from _tensors(prefix, own)
        for name, tensor in _configured_tensors(experts, (*ACTIVATION_SCALES, *WEIGHT_SCALES)):
            yield f"layers.{number}.{name}", tensor
        for name, tensor in _kernel_tensors(experts.quant_method):
            if not _is_uniform(tensor):
                yield f"layers.{number}.{name}", tensor


def initial_layout(model: Any) -> Layout:
    """Return the layout after loading: every expert once, then the first ones again.

    For the layers of this stage; `num_moe_layers` counts those of all stages in some models.
    """
    redundant = model.num_physical_experts - model.num_logical_experts
    row = np.concatenate(
        [np.arange(model.num_logical_experts), np.arange(redundant) % model.num_logical_experts]
    )
    placement = np.tile(row.astype(np.int32), (len(model.moe_layers), 1))
    return Layout(placement, even_shares(placement, model.num_logical_experts))


def ranks_sharing_rows(model: Any, ranks: int, tensor_parallel: int) -> int:
    """Return how many consecutive ranks route the same rows.

    Without data parallelism all ranks have the same tokens; with it, the ranks of a tensor-parallel
    group have, since tokens are exchanged after routing. Ranks with the same rows must pick the
    same replicas; otherwise an expert's row is computed twice, or not at all.
    """
    all_share = any(
        layer.moe_config.dp_size == 1 and not layer.moe_config.is_sequence_parallel
        for layer in model.moe_layers
    )
    return ranks if all_share else tensor_parallel


def _check(number: int, layer: Any) -> None:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    if not isinstance(getattr(layer, "router", None), BaseRouter):
        raise IntegrationError(
            f"layer {number}: {type(layer).__name__} routes by itself, so replicas cannot be chosen"
        )
    if layer.routed_experts.quant_method.is_monolithic:
        kind = type(layer.routed_experts.quant_method).__name__
        raise IntegrationError(
            f"layer {number}: {kind} routes within its kernel, so replicas cannot be chosen"
        )
    if layer.do_naive_dispatch_combine:
        kind = type(layer.routed_experts.quant_method).__name__
        raise IntegrationError(
            f"layer {number}: {kind} routes the rows of all ranks together, so it is unknown "
            "which of them are padding"
        )


def _configured_tensors(experts: Any, parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the kernel of a layer is configured with."""
    config = getattr(getattr(experts, "quant_method", None), "moe_quant_config", None)
    for part in parts:
        yield from _tensors(f"quant_config.{part}", _attributes(config, part))


def _kernel_tensors(method: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a quantisation method and of its kernel, or of the two of which it takes
    one by the number of rows."""
    yield from _tensors("method", vars(method))
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    yield from _tensors("kernel", getattr(kernel, "__dict__", {}))
    for part in KERNEL_PARTS:
        yield from _tensors(f"kernel.{part}", _attributes(kernel, part))


def _is_uniform(tensor: Tensor) -> bool:
    """Whether a small tensor is the same for all slots: limits and strides that kernels keep, a
    copy for each, need not move. One slot says nothing of those of other ranks."""
    if (
        tensor.dim() == 0
        or len(tensor) < 2
        or not 0 < tensor.numel() <= MAX_CONSTANTS * len(tensor)
    ):
        return False
    rows = tensor.detach().reshape(len(tensor), -1).double()
    return bool((rows == rows[:1]).all())


def _attributes(holder: object, name: str) -> Mapping[str, object]:
    """Return the attributes of what `holder` has under a name; none if there is no such thing."""
    return getattr(getattr(holder, name, None), "__dict__", {})


def _tensors(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield those values that are tensors."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{prefix}.{key}", value
