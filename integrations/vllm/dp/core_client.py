"""Installs `dp_load_balancer` in vLLM's core client.

The class is patched once and stays patched. A client gets a scheduler when it is created from a
configuration with `dp_load_balancer`; without one its methods do what they did before.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial, wraps
from os import environ
from typing import Any
from weakref import finalize

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import compatibility
from equipoise.integrations.vllm.dp.client_view import ClientView
from equipoise.integrations.vllm.dp.policy import (
    make_policy,
    may_hold_requests,
    policy_factory,
    rank_capacity,
)
from equipoise.integrations.vllm.dp.request_table import RequestTable
from equipoise.integrations.vllm.dp.scheduler import DpRequestScheduler
from equipoise.integrations.vllm.patching import Patch, apply_patches
from equipoise.integrations.vllm.settings import DpLoadBalancerSettings, parse_settings

LOG = logging.getLogger("vllm.equipoise")

SCHEDULER_ATTRIBUTE = "equipoise_scheduler"
"""Attribute of a client that holds its scheduler."""
CORE_CLIENT_MODULE = "vllm.v1.engine.core_client"
RUST_FRONTEND_VARIABLE = "VLLM_USE_RUST_FRONTEND"

Async = Callable[..., Awaitable[Any]]


def prepare(settings: DpLoadBalancerSettings) -> None:
    """Patch the client class in this process.

    Raises:
        ConfigError: the policy does not exist, or its options are invalid.
        IntegrationError: the class cannot be patched; it is unchanged.
    """
    policy_factory(settings)
    apply_patches(CLIENT_PATCHES)


def dp_config_errors(
    config: Any, settings: DpLoadBalancerSettings, environment: Mapping[str, str]
) -> list[str]:
    """List why `dp_load_balancer` does not support this configuration."""
    parallel = config.parallel_config
    rust = environment.get(RUST_FRONTEND_VARIABLE, "0") not in ("", "0")
    priority = config.scheduler_config.policy == "priority"
    cases = {
        "dp_load_balancer needs --data-parallel-size of at least 2": parallel.data_parallel_size
        < 2,
        "dp_load_balancer runs in the API server: not with an external load balancer": getattr(
            parallel, "data_parallel_external_lb", False
        ),
        "dp_load_balancer does not follow elastic expert parallelism": parallel.enable_elastic_ep,
        f"dp_load_balancer needs the Python front end: not {RUST_FRONTEND_VARIABLE}": rust,
        f"{settings.policy} holds requests, which --scheduling-policy priority would overtake: "
        'take one that pushes, with policy_options {"when_full": "queue"}': priority
        and may_hold_requests(settings),
    }
    return [message for message, applies in cases.items() if applies]


def attach_scheduler(client: Any) -> None:
    """Give a client a scheduler if its configuration has `dp_load_balancer`.

    Raises `EngineUnsupported` that names missing attributes, or what creating the policy raises.
    """
    requested = parse_settings(client.vllm_config.additional_config, environ)
    if requested is None or requested.dp_load_balancer is None:
        return
    missing = [name for name in compatibility.CLIENT_ATTRIBUTES if not hasattr(client, name)]
    if missing:
        raise EngineUnsupported(f"equipoise: vLLM's client has no {', '.join(missing)}")
    settings = requested.dp_load_balancer
    if client.client_count > 1 and client.client_index == 0:
        LOG.warning(
            "equipoise: %d API servers share the ranks, and the policy of each sees its own "
            "requests only; --api-server-count 1 balances best",
            client.client_count,
        )
    ranks = rank_capacity(client.vllm_config, len(client.core_engines), settings)
    policy = make_policy(settings, ranks, client.client_count, client.client_index)
    table = RequestTable(policy, ranks.count)
    scheduler = DpRequestScheduler(ClientView(client, ranks), table, settings.queue_timeout)
    setattr(client, SCHEDULER_ATTRIBUTE, scheduler)
    finalize(client, scheduler.close)


def _init(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        attach_scheduler(self)

    return __init__


def _add(add: Async) -> Async:
    @wraps(add)
    async def add_request_async(self: Any, request: Any) -> None:
        scheduler: DpRequestScheduler | None = getattr(self, SCHEDULER_ATTRIBUTE, None)
        if scheduler is None:
            await add(self, request)
        else:
            await scheduler.add(request, partial(add, self))

    return add_request_async


def _choose(choose: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(choose)
    def get_core_engine_for_request(self: Any, request: Any) -> Any:
        scheduler: DpRequestScheduler | None = getattr(self, SCHEDULER_ATTRIBUTE, None)
        engine_rule = partial(choose, self)
        return (
            engine_rule(request)
            if scheduler is None
            else scheduler.choose_engine(request, engine_rule)
        )

    return get_core_engine_for_request


def _process(process: Async) -> Async:
    @wraps(process)
    async def process_engine_outputs(self: Any, outputs: Any) -> None:
        await process(self, outputs)
        scheduler: DpRequestScheduler | None = getattr(self, SCHEDULER_ATTRIBUTE, None)
        if scheduler is not None:
            scheduler.on_outputs(outputs)

    return process_engine_outputs


def _abort(abort: Async) -> Async:
    @wraps(abort)
    async def abort_requests_async(self: Any, request_ids: list[str]) -> None:
        scheduler: DpRequestScheduler | None = getattr(self, SCHEDULER_ATTRIBUTE, None)
        if scheduler is None:
            await abort(self, request_ids)
        else:
            await scheduler.abort(request_ids, partial(abort, self))

    return abort_requests_async


def _pause(pause: Async) -> Async:
    @wraps(pause)
    async def pause_async(self: Any, mode: str = "abort", clear_cache: bool = True) -> None:
        _abort_queued(self, mode)
        await pause(self, mode, clear_cache)

    return pause_async


def _sleep(sleep: Async) -> Async:
    @wraps(sleep)
    async def sleep_async(self: Any, level: int = 1, mode: str = "abort") -> None:
        _abort_queued(self, mode)
        await sleep(self, level, mode)

    return sleep_async


def _abort_queued(client: Any, mode: str) -> None:
    """Abort queued requests, too, when vLLM aborts all requests."""
    scheduler: DpRequestScheduler | None = getattr(client, SCHEDULER_ATTRIBUTE, None)
    if scheduler is not None and mode == "abort":
        scheduler.abort_queued()


_MAKE: Mapping[str, Callable[[Any], Any]] = {
    "__init__": _init,
    "add_request_async": _add,
    "get_core_engine_for_request": _choose,
    "process_engine_outputs": _process,
    "abort_requests_async": _abort,
    "pause_scheduler_async": _pause,
    "pause_generation_async": _pause,
    "sleep_async": _sleep,
}
_SINCE_033 = ("pause_generation_async",)
"""What `AsyncLLM.pause_generation` calls since 0.33; before, it called `pause_scheduler_async`."""
CLIENT_PATCHES = tuple(
    Patch(CORE_CLIENT_MODULE, f"DPLBAsyncMPClient.{name}", make, optional=name in _SINCE_033)
    for name, make in _MAKE.items()
)
"""All patches of the client class."""
