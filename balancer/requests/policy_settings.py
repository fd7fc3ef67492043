"""The policies by name: what each does, and how it is set."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, unique
from types import MappingProxyType

from equipoise import _native
from equipoise.hal.errors import PolicyError


@unique
class Binding(Enum):
    """When a request gets its worker."""

    PUSH = "push"
    """As it arrives, whether the worker has a free slot or not."""
    POOL = "pool"
    """As late as possible: when a worker has a free slot for it."""


@dataclass(frozen=True)
class PolicyInfo:
    """A policy.

    Attributes:
        binding: when it binds.
        description: one line.
        report_every: seconds between the reports of workers that it was published with; 0: it
            needs none, but knows every token.
    """

    binding: Binding
    description: str
    report_every: float = 0.0


_PUSH, _POOL = Binding.PUSH, Binding.POOL
POLICIES: Mapping[str, PolicyInfo] = MappingProxyType(
    {
        "random": PolicyInfo(_PUSH, "any worker"),
        "round_robin": PolicyInfo(_PUSH, "the next worker"),
        "power_of_two": PolicyInfo(_PUSH, "of two drawn, the worker with fewer requests"),
        "jsq": PolicyInfo(_PUSH, "fewest requests"),
        "vllm_legacy": PolicyInfo(_PUSH, "least 4 * waiting + running, as reported", 0.1),
        "vllm": PolicyInfo(_PUSH, "fewest requests, dearer where they wait and KV is full", 0.1),
        "sglang_tokens": PolicyInfo(_PUSH, "fewest tokens, as reported", 0.02),
        "sglang_cache": PolicyInfo(_PUSH, "most of the prompt cached, unless counts are far apart"),
        "dynamo": PolicyInfo(_PUSH, "fewest prompt tokens to compute and KV tokens together"),
        "llm_d": PolicyInfo(_PUSH, "most of the prompt cached, most KV free, shortest queue", 0.05),
        "tpu_inference": PolicyInfo(_PUSH, "fewest prompt tokens to compute"),
        "jsq_load": PolicyInfo(_PUSH, "fewest KV tokens"),
        "br0": PolicyInfo(_POOL, "largest drop of the imbalance now"),
        "brh": PolicyInfo(
            _POOL, "largest drop of the imbalance over the next steps, by prediction"
        ),
        "fast_phi": PolicyInfo(_PUSH, "least expected overflow over the envelope"),
        "fit": PolicyInfo(_POOL, "nearest to the level that all workers will have (default)"),
    }
)
"""In the order of tables."""


@unique
class WhenFull(Enum):
    """What a policy that pushes does with a request while every worker is full."""

    QUEUE = "queue"
    """Binds it all the same, as published: it waits at the worker."""
    HOLD = "hold"
    """Keeps it, and binds to workers that are not full only."""


@unique
class Predictor(Enum):
    """How `brh` knows when requests end."""

    SURVIVAL = "survival"
    """From the lengths of those that have, given how far a request has come."""
    ORACLE = "oracle"
    """From `Request.expected`."""


@dataclass(frozen=True, kw_only=True)
class RoutingPolicySettings:
    """Which policy, and how it is set.

    Attributes:
        name: of `POLICIES`.
        when_full: of policies that push.
        predictor: of `brh`.
        front_ends: how many processes route to these workers; each sees its own requests, and
            of the others' what workers report, or, before they do, as much as its own.
        front_end: which of them this is.
        seed: of policies that draw.
        greedy_slots: `br0`, `brh`: with more free slots than that in all, requests are bound one
            by one. Not published; with 1 the published imbalances are met, BF-IO's code has 7.
        subset: `br0`, `brh`: waiting requests of which a worker takes the best subset, 1 to 16.
        candidates: `br0`, `brh`: waiting requests that are looked at one by one.
        horizon: `brh`: steps ahead.
        alpha: `brh`: what load is worth.
        beta: `brh`: what overflow costs; 0: as much as there are workers.
        gamma: `brh`: what a step counts, in terms of the one before; above 0, at most 1.
        points: `fast_phi`: points of the distribution of outputs.
        window: `fit`: waiting requests that are chosen from.
        ageing: `fit`: what having waited for a decision is worth, in tokens. More is fairer, less
            is more even.
        slack: `fit`: how far above the mean load a worker still takes requests, as a part of it.
        prompt_weight: `fit`: what computing a prompt token costs, in KV tokens read in one step;
            0: workers do not compute prompts, or it is not looked at.
        gather: `fit`, with a `prompt_weight`: requests wait for each other, so that workers compute
            prompts at the same time, until so many times the cost of computing one alone is lost;
            0: never.
    """

    name: str = "fit"
    when_full: WhenFull = WhenFull.QUEUE
    predictor: Predictor = Predictor.SURVIVAL
    front_ends: int = 1
    front_end: int = 0
    seed: int = 0
    greedy_slots: int = 1
    subset: int = 4
    candidates: int = 1024
    horizon: int = 80
    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.96
    points: int = 5
    window: int = 32
    ageing: float = 16.0
    slack: float = 0.07
    prompt_weight: float = 0.0
    gather: float = 1.0

    @property
    def info(self) -> PolicyInfo:
        """What the policy is. Raises PolicyError for an unknown name."""
        if self.name not in POLICIES:
            raise PolicyError(f"no policy is called {self.name!r}: there are {', '.join(POLICIES)}")
        return POLICIES[self.name]

    def native(self) -> _native.PolicySettings:
        """The same, for the native core. Raises PolicyError for what it cannot hold."""
        made = _native.PolicySettings()
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                setattr(made, field.name, value.value if isinstance(value, Enum) else value)
            except TypeError as error:
                raise PolicyError(f"{field.name}: {value!r} is not what it takes") from error
        return made
