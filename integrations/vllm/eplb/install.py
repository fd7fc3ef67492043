"""Our placement policy in the engine's own balancer.

Our engine as the engine's balancer: switched on for a worker, before it loads its model.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.patching import ORIGINAL_ATTRIBUTE, Patch, apply_patches
from equipoise.integrations.vllm.settings import EplbPolicySettings, EplbSettings

POLICY_MODULE = "vllm.distributed.eplb.policy"
POLICY_NAME = "default"
"""The only policy that the engine's configuration takes."""


@contextmanager
def install_policy(settings: EplbPolicySettings) -> Iterator[None]:
    """Have models that are loaded within the context planned for by us."""
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    from equipoise.integrations.vllm.eplb.policy import policy_class

    restore_policy()
    stock = EPLB_POLICIES[POLICY_NAME]
    ours = policy_class(settings, stock)
    setattr(ours, ORIGINAL_ATTRIBUTE, stock)
    EPLB_POLICIES[POLICY_NAME] = ours
    try:
        yield
    finally:
        restore_policy()


def restore_policy() -> None:
    """Put back what ours has replaced, if it has: a policy of somebody else's stays."""
    loaded: Any = sys.modules.get(POLICY_MODULE)
    policies = {} if loaded is None else loaded.EPLB_POLICIES
    stock = getattr(policies.get(POLICY_NAME), ORIGINAL_ATTRIBUTE, None)
    if stock is not None:
        policies[POLICY_NAME] = stock


@dataclass(frozen=True)
class EplbRequest:
    """What a worker asked for.

    Attributes:
        parallel_config: its parallel configuration, by which it is known; kept, so that nobody has
            its id.
        target_config: configuration of the model that it serves; others are drafts.
        settings: of the part.
        states: the states that were made for it.
    """

    parallel_config: Any
    target_config: Any
    settings: EplbSettings
    states: list[Any]


EPLB_REQUESTS: dict[int, EplbRequest] = {}
"""By the id of a worker's parallel configuration."""


_BY_SLOT = "goes by the slots that experts were loaded into, and equipoise moves them"
REFUSED_METHODS = {
    "reload_weights": _BY_SLOT,
    "update_weights": _BY_SLOT,
    "save_sharded_state": _BY_SLOT,
    "save_tensorized_model": _BY_SLOT,
    "checkpoint_prepare": "ends vLLM's groups, and equipoise has groups of its own",
}
"""What a worker does that goes wrong beside the engine, and why."""


@contextmanager
def install_eplb_state(worker: Any, settings: EplbSettings) -> Iterator[None]:
    """Have models that `worker` loads within the context balanced by us."""
    from equipoise.integrations.vllm.eplb.layer_state import ROUTER_PATCH

    parallel, states = worker.vllm_config.parallel_config, list[Any]()
    apply_patches((*STATE_PATCHES, ROUTER_PATCH))
    EPLB_REQUESTS[id(parallel)] = EplbRequest(
        parallel, worker.vllm_config.model_config, settings, states
    )
    refused = [name for name in REFUSED_METHODS if hasattr(worker, name)]
    for name in refused:
        setattr(worker, name, partial(_refuse, name))
    try:
        yield
    finally:
        for name in refused:
            delattr(worker, name)
        del EPLB_REQUESTS[id(parallel)]
        for state in states:
            state.close()


def current_placement(worker: Any) -> list[list[int]] | None:
    """By layer of the model that came last, the target's: the expert in every slot."""
    states = EPLB_REQUESTS[id(worker.vllm_config.parallel_config)].states
    models = [model for state in states for model in state.model_states.values()]
    if not models:
        return None
    placement: list[list[int]] = models[-1].balancer.layout.placement.tolist()
    return placement


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise IntegrationError(f"{name} {REFUSED_METHODS[name]}: switch its engine off for that")


def _chosen(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock, updated=())
    def state(parallel_config: Any, device: Any) -> Any:
        request = EPLB_REQUESTS.get(id(parallel_config))
        if request is None:
            return stock(parallel_config, device)
        from equipoise.integrations.vllm.eplb.state import EquipoiseEplbState

        request.states.append(
            EquipoiseEplbState(parallel_config, device, request.settings, request.target_config)
        )
        return request.states[-1]

    return state


STATE_PATCHES = (
    Patch("vllm.v1.worker.gpu_model_runner", "EplbState", _chosen),
    Patch("vllm.v1.worker.gpu.eplb_utils", "EplbState", _chosen),
)
"""Both runners of vLLM: each makes a state of ours where the worker asked for it."""
