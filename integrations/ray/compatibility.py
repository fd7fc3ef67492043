"""Which releases of Ray are tested, and what the router calls and overrides in Ray Serve."""

from equipoise.hal.errors import EngineUnsupported
from equipoise.integrations.vllm.compatibility import (
    ANY_SIGNATURE,
    Release,
    Symbol,
    symbol_problems,
)

RELEASE = Release("Ray", ("ray",), ("2.60.0",), accept_variable="EQUIPOISE_RAY_ACCEPT_VERSION")
ROUTER = "ray.serve.request_router"
POWER_OF_TWO = "ray.serve._private.request_router.pow_2_router"
CHOOSE = "RequestRouter._choose_replica_for_request"

SYMBOLS = (
    Symbol(ROUTER, CHOOSE, "self, pending_request, *, is_retry="),
    Symbol(ROUTER, "RequestRouter._backoff", "self, attempt"),
    Symbol(ROUTER, "RequestRouter.initialize_state", "self, **kwargs"),
    Symbol(ROUTER, "RequestRouter.update_replicas", "self, replicas"),
    Symbol(ROUTER, "RequestRouter.on_replica_actor_died", "self, replica_id"),
    Symbol(ROUTER, "RequestRouter.on_request_routed", "self, pending_request, replica_id, result"),
    Symbol(ROUTER, "RequestRouter.on_request_completed", "self, replica_id, internal_request_id"),
    Symbol(ROUTER, "RunningReplica.max_ongoing_requests", ANY_SIGNATURE),
    Symbol(ROUTER, "RunningReplica.routing_stats", ANY_SIGNATURE),
    Symbol(ROUTER, "RunningReplica.replica_id", ANY_SIGNATURE),
    Symbol(ROUTER, "RunningReplica.is_cross_language", ANY_SIGNATURE),
    Symbol(POWER_OF_TWO, "PowerOfTwoChoicesRequestRouter", ANY_SIGNATURE),
)
"""Ray calls this interface alpha. `_choose_replica_for_request` is private in name, and what Ray's
own `CapacityQueueRouter` overrides; `choose_replicas`, which is public, is called for twice as many
requests at a time as there are replicas, and says nothing of requests that are given up."""

ROUTER_ATTRIBUTES = (
    "_deployment_id",
    "_replicas",
    "_use_replica_queue_len_cache",
    "queue_wait_time_ms_histogram",
)
"""What the router reads of itself, set by Ray's `__init__`: only an object shows whether it is."""


def check_symbols(router: object) -> None:
    """Raises `EngineUnsupported`, which names what this Ray, or its `router`, lacks.

    Any version that has `SYMBOLS` and `ROUTER_ATTRIBUTES` is taken: without them requests would go
    by Ray's own choice.
    """
    problems = [*symbol_problems(SYMBOLS)]
    problems += [
        f"{ROUTER}:RequestRouter sets no {name}"
        for name in ROUTER_ATTRIBUTES
        if not hasattr(router, name)
    ]
    if problems:
        raise EngineUnsupported(f"this Ray is not supported: {'; '.join(problems)}")
