"""Installs `dp_load_balancer`: a client that derives from vLLM's own takes its place.

It does so once and for good. A client gets a scheduler when it is created from a configuration with
`dp_load_balancer`; without one its methods are those of its base.
"""

from collections.abc import Mapping
from functools import partial, update_wrapper
from os import environ
from typing import Any
from weakref import finalize

from equipoise.balancer.requests.remote_policy import RemotePolicy
from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm import compatibility
from equipoise.integrations.vllm.dp.api_servers import share_policy
from equipoise.integrations.vllm.dp.client_view import ClientView
from equipoise.integrations.vllm.dp.policy import (
    make_policy,
    may_hold_requests,
    policy_factory,
    rank_capacity,
)
from equipoise.integrations.vllm.dp.scheduler import DpRequestScheduler, RunningLoopClock
from equipoise.integrations.vllm.patching import Patch, apply_patches
from equipoise.integrations.vllm.settings import DpLoadBalancerSettings, parse_settings

CORE_CLIENT_MODULE = "vllm.v1.engine.core_client"
RUST_FRONTEND_VARIABLE = "VLLM_USE_RUST_FRONTEND"


def prepare(settings: DpLoadBalancerSettings) -> None:
    """Let vLLM create our client in this process.

    Raises:
        ConfigError: the policy does not exist, or its options are invalid.
        IntegrationError: the class cannot be replaced.
    """
    policy_factory(settings)
    apply_patches([CLIENT_PATCH])


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
        # vLLM sets it from VLLM_DP_RANK_LOCAL, for ranks that were started without a server.
        "dp_load_balancer runs in the API server: not in an offline LLM": (
            parallel.data_parallel_size > 1
            and getattr(parallel, "data_parallel_rank_local", None) is not None
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

    Raises `EngineUnsupported` that names missing attributes, `IntegrationError` where several API
    servers cannot share the policy, or what creating the policy raises.
    """
    requested = parse_settings(client.vllm_config.additional_config, environ)
    if requested is None or requested.dp_load_balancer is None:
        return
    missing = [name for name in compatibility.CLIENT_ATTRIBUTES if not hasattr(client, name)]
    if missing:
        raise EngineUnsupported(f"equipoise: vLLM's client has no {', '.join(missing)}")
    settings = requested.dp_load_balancer
    ranks = rank_capacity(client.vllm_config, len(client.core_engines), settings)
    make = partial(make_policy, settings, ranks)
    shared: RemotePolicy | None = None
    if client.client_count > 1:
        shared = RemotePolicy(
            RunningLoopClock(), lambda lost: scheduler.dispatcher.fail_policy(lost)
        )
    scheduler = DpRequestScheduler(
        ClientView(client, ranks), shared or make(), settings.queue_timeout
    )
    if shared is not None:
        served = share_policy(client, shared, scheduler.dispatcher, make)
        if served is not None:
            finalize(client, served.close)
    client.equipoise_scheduler = scheduler
    finalize(client, scheduler.close)


def client_class(base: Any) -> type:
    """Derive the client from vLLM's `DPLBAsyncMPClient`, of any supported version."""

    class EquipoiseDPLBAsyncMPClient(base):  # type: ignore[misc]
        """A client that may have a scheduler of requests.

        Attributes:
            equipoise_scheduler: chooses the ranks; None if `dp_load_balancer` is off.
        """

        equipoise_scheduler: DpRequestScheduler | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            attach_scheduler(self)

        async def add_request_async(self, request: Any) -> None:
            send = super().add_request_async
            if self.equipoise_scheduler is None:
                await send(request)
            else:
                await self.equipoise_scheduler.add(request, send)

        def get_core_engine_for_request(self, request: Any) -> Any:
            engine_rule = super().get_core_engine_for_request
            if self.equipoise_scheduler is None:
                return engine_rule(request)
            return self.equipoise_scheduler.choose_engine(request, engine_rule)

        # vLLM calls it with the client, from a task that does not keep the client alive.
        @staticmethod
        async def process_engine_outputs(self: Any, outputs: Any) -> None:
            await base.process_engine_outputs(self, outputs)
            if self.equipoise_scheduler is not None:
                self.equipoise_scheduler.on_outputs(outputs)

        async def abort_requests_async(self, request_ids: list[str]) -> None:
            abort = super().abort_requests_async
            if self.equipoise_scheduler is None:
                await abort(request_ids)
            else:
                await self.equipoise_scheduler.abort(request_ids, abort)

        async def pause_scheduler_async(
            self, mode: str = "abort", clear_cache: bool = True
        ) -> None:
            _abort_queued(self.equipoise_scheduler, mode)
            await super().pause_scheduler_async(mode, clear_cache)

        # `AsyncLLM.pause_generation` calls it since 0.33, and the method above before.
        if hasattr(base, "pause_generation_async"):

            async def pause_generation_async(
                self, mode: str = "abort", clear_cache: bool = True
            ) -> None:
                _abort_queued(self.equipoise_scheduler, mode)
                await super().pause_generation_async(mode, clear_cache)

        async def sleep_async(self, level: int = 1, mode: str = "abort") -> None:
            _abort_queued(self.equipoise_scheduler, mode)
            await super().sleep_async(level, mode)

    # For the signature, which is looked at before the class is replaced, and may be after it.
    update_wrapper(EquipoiseDPLBAsyncMPClient.__init__, base.__init__)
    return EquipoiseDPLBAsyncMPClient


def _abort_queued(scheduler: DpRequestScheduler | None, mode: str) -> None:
    """Abort queued requests, too, when vLLM aborts all requests."""
    if scheduler is not None and mode == "abort":
        scheduler.abort_queued()


CLIENT_PATCH = Patch(CORE_CLIENT_MODULE, "DPLBAsyncMPClient", client_class)
"""The name by which vLLM's factory finds the class."""
