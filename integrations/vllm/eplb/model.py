"""Scales that are taken for one and the same by all experts, looked at before any expert moves.

From a model of vLLM's to one of ours: which tensors are its experts, and where they start.

vLLM lists what moves with an expert (`get_expert_weights`), and moves nothing else. What a layer's
experts hold beside that is looked at once more here: a scale that was derived while loading, and is
not on the list, would stay behind, and answers would be wrong from the first rebalance on.
"""

from collections.abc import Iterator, Sequence
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
"""Not on vLLM's list of what moves: it repeats one value, in most formats."""


def shared_scales(model: Any) -> list[tuple[str, Tensor]]:
    """What has to be alike, by name; the same names on every rank."""
    return [
        (f"layers.{number}.{name}", tensor)
        for number, layer in enumerate(model.moe_layers)
        for name in SHARED_SCALES
        if isinstance(tensor := getattr(layer.routed_experts, name, None), Tensor)
        and tensor.numel()
    ]


def check_shared_scales(scales: Sequence[tuple[str, Tensor]], group: Any) -> None:
    """Whether each holds one value, on all ranks; collective, over the host.

    Some kernels of NVFP4 keep a value for each expert, and fold it into what does move: an expert
    that moved would be scaled by another's.

    Args:
        scales: see `scales`.
        group: of the expert-parallel ranks, for the host's tensors.

    Raises:
        IntegrationError: names those that do not, on every rank.
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
    "*hash_indices_table": "the router's",
    "*expert_load*": "counts, by slot",
    "*logical_to_physical_map": "the engine's own table",
    "*logical_replica_count": "the engine's own table",
}
"""What looks like experts' by its shape, and why it does not move."""


def expert_model(model: Any, name: str, device: torch.device) -> ExpertModel:
    """The experts of a model that has its weights, and was told its state.

    Args:
        model: keeps vLLM's protocol `MixtureOfExperts`; `expert_weights[layer]` are the tensors of
            a layer, [slots of this rank, ...] each.
        name: among the models of the engine.
        device: where they are.

    Raises:
        IntegrationError: a layer routes in a way that never asks for slots.
        RegistrationError, ModelIncomplete: a tensor cannot move slot by slot; or one that would
            have to is not on vLLM's list.
    """
    registry = ModelRegistry(
        name, model.num_local_physical_experts, model.num_logical_experts, device=device
    )
    for number, (layer, weights) in enumerate(
        zip(model.moe_layers, model.expert_weights, strict=True)
    ):
        _check(number, layer)
        registry.register(number, {f"weight {at}": tensor for at, tensor in enumerate(weights)})
    return registry.finalize(_held(model), ignore=NOT_EXPERT_WEIGHTS)


def initial_layout(model: Any) -> Layout:
    """What vLLM's loader puts into the slots: every expert once, then the first ones again.

    Of this stage's layers; `num_moe_layers` counts those of all stages in some models.
    """
    redundant = model.num_physical_experts - model.num_logical_experts
    row = np.concatenate(
        [np.arange(model.num_logical_experts), np.arange(redundant) % model.num_logical_experts]
    )
    placement = np.tile(row.astype(np.int32), (len(model.moe_layers), 1))
    return Layout(placement, even_shares(placement, model.num_logical_experts))


def ranks_sharing_rows(model: Any, ranks: int, tensor_parallel: int) -> int:
    """How many neighbouring ranks route the same rows.

    Without data parallelism all ranks have the same tokens; with it, those of a tensor-parallel
    group have, for tokens are exchanged behind the routing. Ranks that see the same rows must pick
    the same replicas: else two compute a row's expert, or nobody does.
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
            f"layer {number}: {type(layer).__name__} routes by itself, where nobody can choose "
            "replicas"
        )
    if layer.routed_experts.quant_method.is_monolithic:
        kind = type(layer.routed_experts.quant_method).__name__
        raise IntegrationError(
            f"layer {number}: {kind} routes within its kernel, where nobody can choose replicas"
        )
    if layer.do_naive_dispatch_combine:
        kind = type(layer.routed_experts.quant_method).__name__
        raise IntegrationError(
            f"layer {number}: {kind} has the rows of all ranks routed together, where nobody says "
            "which of them are padding"
        )


def _held(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Everything that the experts' modules hold: parameters, buffers, attributes."""
    for number, layer in enumerate(model.moe_layers):
        for path, module in layer.routed_experts.named_modules():
            prefix = ".".join(filter(None, (f"layers.{number}", path)))
            for own in (module._parameters, module._buffers, vars(module)):
                for key, value in own.items():
                    if isinstance(value, Tensor):
                        yield f"{prefix}.{key}", value
