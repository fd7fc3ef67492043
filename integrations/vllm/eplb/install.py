"""Installs our EPLB in vLLM: `install_policy` as policy of its EPLB, `install_eplb_state` as
EPLB."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.entry import ORIGINAL_ATTRIBUTE
from equipoise.integrations.vllm.patching import Patch, apply_patches
from equipoise.integrations.vllm.settings import EplbPolicySettings, EplbSettings

POLICY_MODULE = "vllm.distributed.eplb.policy"
POLICY_NAME = "default"
"""The only policy that vLLM's configuration accepts; ours is registered under its name."""


@contextmanager
def install_policy(settings: EplbPolicySettings) -> Iterator[None]:
    """Use our policy for models that are loaded in the context."""
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    from equipoise.integrations.vllm.eplb.policy import policy_class

    restore_policy()
    stock = EPLB_POLICIES[POLICY_NAME]
    policy = policy_class(settings, stock)
    setattr(policy, ORIGINAL_ATTRIBUTE, stock)
    EPLB_POLICIES[POLICY_NAME] = policy
    try:
        yield
    finally:
        restore_policy()


def restore_policy() -> None:
    """Restore the policy that ours has replaced; a third-party policy stays."""
    module: Any = sys.modules.get(POLICY_MODULE)
    policies = {} if module is None else module.EPLB_POLICIES
    stock = getattr(policies.get(POLICY_NAME), ORIGINAL_ATTRIBUTE, None)
    if stock is not None:
        policies[POLICY_NAME] = stock


@dataclass(frozen=True)
class EplbRequest:
    """A worker's request for our EPLB state.

    Attributes:
        parallel_config: the worker's parallel configuration. Its `id()` is the key of the request,
            and the reference here keeps that id from being reused.
        target_config: configuration of the target model; other models are drafts.
        settings: of `eplb`.
        states: the states that were created for the worker.
    """

    parallel_config: Any
    target_config: Any
    settings: EplbSettings
    states: list[Any]


EPLB_REQUESTS: dict[int, EplbRequest] = {}
"""By `id()` of a worker's parallel configuration."""


_BY_SLOT = "relies on the slots that experts were loaded into, and equipoise moves experts"
REFUSED_METHODS = {
    "reload_weights": _BY_SLOT,
    "update_weights": _BY_SLOT,
    "save_sharded_state": _BY_SLOT,
    "save_tensorized_model": _BY_SLOT,
    "checkpoint_prepare": "ends vLLM's groups, and equipoise has groups of its own",
}
"""Methods of a worker that do not work with `eplb`, and why."""


@contextmanager
def install_eplb_state(worker: Any, settings: EplbSettings) -> Iterator[None]:
    """Balance the models that `worker` loads in the context."""
    from equipoise.integrations.vllm.eplb.layer_state import ROUTER_PATCH

    parallel, states = worker.vllm_config.parallel_config, list[Any]()
    apply_patches((*STATE_PATCHES, ROUTER_PATCH))
    EPLB_REQUESTS[id(parallel)] = EplbRequest(
        parallel, worker.vllm_config.model_config, settings, states
    )
    refused_methods = [name for name in REFUSED_METHODS if hasattr(worker, name)]
    for name in refused_methods:
        setattr(worker, name, partial(_refuse, name))
    try:
        yield
    finally:
        for name in refused_methods:
            delattr(worker, name)
        del EPLB_REQUESTS[id(parallel)]
        for state in states:
            state.close()


def current_placement(worker: Any) -> list[list[int]] | None:
    """Return the expert in every slot by layer, of the model loaded last, which is the target."""
    states = EPLB_REQUESTS[id(worker.vllm_config.parallel_config)].states
    models = [model for state in states for model in state.model_states.values()]
    if not models:
        return None
    placement: list[list[int]] = models[-1].balancer.layout.placement.tolist()
    return placement


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise IntegrationError(f"{name} {REFUSED_METHODS[name]}: switch eplb off for that")


def _choose_state(stock: Callable[..., Any]) -> Callable[..., Any]:
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
    Patch("vllm.v1.worker.gpu_model_runner", "EplbState", _choose_state),
    Patch("vllm.v1.worker.gpu.eplb_utils", "EplbState", _choose_state),
)
"""Patches of both model runners: they create our state if the worker has `eplb`."""
