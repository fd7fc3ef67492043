"""Routers of peers that look at cached prompts, where counts are larger than small cases have."""

from equipoise.balancer.requests.policy import Capacity, Request
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.request_router import RequestRouter

CACHED = [100, 0, 0]
"""The whole prompt at worker 0."""


def worker_of_request(router: RequestRouter, name: int, hits: list[int] | None) -> int:
    (assignment,) = router.on_arrival(Request(id=name, size=100, hits=hits)).assignments
    return assignment.worker


def test_sglang_cache_follows_cache_until_counts_diverge() -> None:
    router = RequestRouter(RoutingPolicySettings(name="sglang_cache"), [Capacity()] * 3)
    assert [worker_of_request(router, name, CACHED) for name in range(65)] == [0] * 65
    assert worker_of_request(router, 65, CACHED) == 1  # 65 more, and more than 1.5 times as many
    assert worker_of_request(router, 66, CACHED) == 2
    assert worker_of_request(router, 67, CACHED) == 0  # 64 more


def test_sglang_cache_ignores_small_cached_part() -> None:
    router = RequestRouter(RoutingPolicySettings(name="sglang_cache"), [Capacity()] * 3)
    assert worker_of_request(router, 0, None) == 0
    assert worker_of_request(router, 1, [30, 0, 0]) == 1
    assert worker_of_request(router, 2, [31, 0, 0]) == 0


def test_prefix_policies_charge_no_compute_for_fully_cached_prompt() -> None:
    for name, expected in (("dynamo", [0, 0, 1]), ("tpu_inference", [0, 0, 0])):
        router = RequestRouter(RoutingPolicySettings(name=name), [Capacity()] * 3)
        # Dynamo counts its tokens in the cache all the same.
        assert [worker_of_request(router, number, CACHED) for number in range(3)] == expected, name
