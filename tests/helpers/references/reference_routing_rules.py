"""The published rules, in plain Python, and as slow as that is.

Written from the formulas of the papers and projects that docs/design/request-balance.md names,
not from csrc. Where those leave a choice, what the native policies do stands, and is said here:

- Equal scores: the worker with the lowest number, counted from a start where the rule has one; the
  request that came first; the subset whose last member came first (subsets in binary order).
- Loads and counts are of own requests and, once workers have reported, of others' in the reports;
  before, others are taken to have as much as we have.
- A lost worker does not meet the others at the barrier: G counts those that are there.
- A worker whose cache has no room for any of the requests that are looked at is passed over.
"""

from collections.abc import Callable, Sequence

from helpers.references.reference_front_end import SlowFront, SlowPolicy
from helpers.references.reference_late_binding_rules import Br0, Brh, Fit
from helpers.references.reference_prefix_rules import Dynamo, LlmD, SglangCache, TpuInference
from helpers.references.reference_push_rules import (
    FastPhi,
    Jsq,
    JsqLoad,
    PowerOfTwo,
    Random,
    RoundRobin,
    SglangTokens,
    Vllm,
    VllmLegacy,
)

from equipoise.balancer.requests.policy import Capacity
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings

SLOW: dict[str, Callable[[RoutingPolicySettings, int], SlowPolicy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "jsq": Jsq,
    "jsq_load": JsqLoad,
    "vllm_legacy": VllmLegacy,
    "vllm": Vllm,
    "sglang_tokens": SglangTokens,
    "sglang_cache": SglangCache,
    "dynamo": Dynamo,
    "llm_d": LlmD,
    "tpu_inference": TpuInference,
    "fast_phi": FastPhi,
    "br0": Br0,
    "brh": Brh,
    "fit": Fit,
}
"""By name."""


def slow_front(settings: RoutingPolicySettings, workers: Sequence[Capacity]) -> SlowFront:
    """A front end with the policy of these settings."""
    policy = SLOW[settings.name](settings, len(workers))
    front = SlowFront(policy, workers, settings.front_ends)
    front.lockstep = settings.lockstep
    return front
