"""The request router of a deployment handle: Ray Serve's events in, replicas out.

Ray copies this module by value into every process that has a handle, so it has no state of its own.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.util import metrics

from equipoise.balancer.requests.dispatcher import RequestClosed
from equipoise.integrations.ray.compatibility import check_symbols
from equipoise.integrations.ray.replica_pool import LOG, NoBinding, ReplicaPool, RoutedRequest
from equipoise.integrations.ray.request_sizes import MAX_TOKENS
from equipoise.integrations.ray.settings import RouterSettings, router_settings

GENERATED_TOKENS, ONGOING_REQUESTS = "generated_tokens", "ongoing_requests"
"""Keys of what a deployment may publish by `record_routing_stats`."""
POLICY, MULTIPLEXED, NO_POLICY, FAILED = "policy", "multiplexed", "no_policy", "policy_failed"
"""Who chose a replica: the policy, or Ray, for this reason."""
RETRIED = "retried"
"""A choice that came to nothing: the replica was full, or gone before the request had begun."""
ROUTING = "equipoise_routing"
"""Attribute of Ray's `PendingRequest`, which cannot be a key: it has no hash, and calls of one
request share their id."""


@dataclass
class Routing:
    """What is known of one `PendingRequest`.

    Attributes:
        request: as the pool has it.
        failures: attempts that came to nothing.
    """

    request: RoutedRequest
    failures: int = 0


class EquipoiseRequestRouter(PowerOfTwoChoicesRequestRouter):  # type: ignore[misc] # no Ray there
    """Holds the requests of a handle until the policy binds them to replicas.

    Everything runs on the event loop of the handle's router. Where there is no policy, because of
    its settings, its failure, or this version of Ray, the choice is Ray's own, of two replicas the
    one with fewer requests; that is logged once, and counted.

    Attributes:
        counts: choices by who made them, and those that came to nothing.
        pool: requests and replicas as the policy has them; None before the first of either, or
            where there is no policy.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: Counter[str] = Counter()
        self.pool: ReplicaPool | None = None
        self._settings: RouterSettings | None = None
        self._size_failed = self._statistic_failed = False
        # Without it there are no labels; `initialize_state` logs that it is missing.
        names = getattr(self, "_deployment_id", None)
        self._choices = metrics.Counter(
            "equipoise_ray_choices",
            description="Choices of a replica, by who made them, and those that came to nothing.",
            tag_keys=("deployment", "application", "by"),
        ).set_default_tags(
            {
                "deployment": getattr(names, "name", ""),
                "application": getattr(names, "app_name", ""),
            }
        )

    def initialize_state(self, **settings: Any) -> None:
        """Take `request_router_kwargs`: the arguments of `router_settings`."""
        try:
            check_symbols(self)
            self._settings = router_settings(**settings)
        except Exception as error:
            # Ray would log what is raised here, and let every request of this handle wait forever.
            LOG.error("requests go by Ray's own choice: %s", error)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Tell the policy which replicas there are, what each takes, and what it says of itself."""
        super().update_replicas(replicas)
        pool = self._open_pool()
        if pool is None:
            return
        pool.set_replicas({one.replica_id: one.max_ongoing_requests for one in replicas})
        for one in replicas:
            generated = self._statistic(one.routing_stats, GENERATED_TOKENS)
            if generated is not None:
                ongoing = self._statistic(one.routing_stats, ONGOING_REQUESTS)
                pool.share_tokens(one.replica_id, generated, ongoing or 0)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Have what it had not begun bound to others."""
        super().on_replica_actor_died(replica_id)
        if self.pool is not None:
            self.pool.lose(replica_id)

    async def _choose_replica_for_request(
        self, pending_request: Any, *, is_retry: bool = False
    ) -> Any:
        """Wait until the policy binds the request; returns the replica.

        Cancelled with the task of the request, which is how Ray ends a wait that takes too long.
        """
        pool = self._open_pool()
        if pending_request.metadata.multiplexed_model_id:
            by = MULTIPLEXED  # where a model is loaded counts for more, and Ray knows where
        elif pool is None:
            by = NO_POLICY
        elif pool.stopped:
            by = FAILED
        else:
            try:
                return await self._choose(pool, pending_request)
            except NoBinding:
                by = FAILED
        self._count(by)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """The replica has accepted the request: it begins there."""
        super().on_request_routed(pending_request, replica_id, result)
        routing = getattr(pending_request, ROUTING, None)
        if routing is not None and self.pool is not None:
            self.pool.begin(routing.request)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """An attempt is over, whatever became of it: its slot is free."""
        super().on_request_completed(replica_id, internal_request_id)
        if self.pool is not None:
            self.pool.end(replica_id, internal_request_id)

    def _open_pool(self) -> ReplicaPool | None:
        # Here and not at the start: it takes the running loop, which is the handle's.
        if self.pool is None and self._settings is not None:
            try:
                self.pool = ReplicaPool(self._settings.factory)
            except Exception as error:
                # Raised in `update_replicas` it would leave every request waiting, too.
                LOG.error("requests go by Ray's own choice: %s", error)
                self._settings = None
        return self.pool

    async def _choose(self, pool: ReplicaPool, pending_request: Any) -> Any:
        routing: Routing | None = getattr(pending_request, ROUTING, None)
        if routing is None:
            routing = Routing(pool.submit(self._size_of(pending_request)))
            setattr(pending_request, ROUTING, routing)
            failed = None
        else:
            self._count(RETRIED)
            failed = pool.fail(routing.request)
        try:
            # Closed: the end of the failed attempt was told before this, and nobody says why it
            # failed. A replica that was lost needs no pause: the policy has others already.
            if failed is not None or isinstance(routing.request.status, RequestClosed):
                await self._backoff(routing.failures)
                routing.failures += 1
                routing.request = pool.retry(routing.request, failed)
            while True:
                bound = await routing.request.wait_until_bound()
                replica = self._replicas.get(pool.replica(bound))
                if replica is not None:
                    break
                # It left the list since.
                routing.request = pool.retry(routing.request, bound)
            call = pending_request.metadata.internal_request_id
            asked = self._use_replica_queue_len_cache and not replica.is_cross_language
            waited = time.time() - pending_request.created_at
            self.queue_wait_time_ms_histogram.observe(1000 * waited)
            self._count(POLICY)
        except BaseException:
            pool.abort(routing.request)
            raise
        # Nothing of Ray's is called from here on: of an attempt whose choice raised it would never
        # say that it is over.
        pool.send(routing.request, call)
        if not asked:
            # The replica accepts whatever is sent: it has begun.
            pool.begin(routing.request)
        return replica

    def _statistic(self, published: Any, name: str) -> int | None:
        """A count that a deployment publishes; None: it publishes none, or what is no count."""
        if isinstance(published, Mapping) and name not in published:
            return None
        value = published[name] if isinstance(published, Mapping) else published
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as a library of metrics counts
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
            return int(value)
        if not self._statistic_failed:
            LOG.error("record_routing_stats: %s has to be a count, got %.80r: ignored", name, value)
        self._statistic_failed = True
        return None

    def _size_of(self, pending_request: Any) -> int:
        assert self._settings is not None
        try:
            size = int(self._settings.request_size(pending_request.args, pending_request.kwargs))
        except Exception as error:
            # A user's function may raise anything; the request is served nevertheless.
            if not self._size_failed:
                LOG.error("request_size failed: such requests count as one token", exc_info=error)
            self._size_failed = True
            return 1
        return max(1, min(size, MAX_TOKENS))

    def _count(self, by: str) -> None:
        self.counts[by] += 1
        self._choices.inc(tags={"by": by})
