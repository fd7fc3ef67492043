"""The routing policies by name, with their settings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, unique
from types import MappingProxyType

from equipoise import _native
from equipoise.hal.errors import PolicyError


@unique
class Binding(Enum):
    """When a request is bound to a worker."""

    PUSH = "push"
    """On arrival, whether or not the worker has a free slot."""
    POOL = "pool"
    """As late as possible: when a worker has a free slot."""


@dataclass(frozen=True)
class PolicyInfo:
    """Description of a policy.

    Attributes:
        binding: when it binds requests.
        description: one line.
        report_interval: seconds between reports of workers in its publication; 0: it needs no
            reports, but every token.
    """

    binding: Binding
    description: str
    report_interval: float = 0.0


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
"""In the order of tables in reports."""


@unique
class WhenFull(Enum):
    """What a push policy does with a request while every worker is full."""

    QUEUE = "queue"
    """Binds it, as published: it waits in the worker's queue."""
    HOLD = "hold"
    """Keeps it until a worker is not full."""


@unique
class Predictor(Enum):
    """How `brh` predicts when requests end."""

    SURVIVAL = "survival"
    """From the lengths of ended requests, given the tokens that a request has made."""
    ORACLE = "oracle"
    """From `Request.expected`."""


OPTION_POLICIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "when_full": tuple(name for name, info in POLICIES.items() if info.binding is _PUSH),
        "predictor": ("brh",),
        **dict.fromkeys(("greedy_slots", "subset", "candidates"), ("br0", "brh")),
        **dict.fromkeys(("horizon", "alpha", "beta", "gamma"), ("brh",)),
        "points": ("fast_phi",),
        **dict.fromkeys(("window", "wait_bonus", "slack", "overshoot"), ("fit",)),
        **dict.fromkeys(("prompt_weight", "prefill_wait"), ("fit",)),
    }
)
"""Settings that only some policies read, and which."""


@dataclass(frozen=True, kw_only=True)
class RoutingPolicySettings:
    """The settings of a policy.

    Attributes:
        name: a key of `POLICIES`.
        when_full: push policies: what to do while all workers are full.
        predictor: `brh`: how ends are predicted.
        front_ends: number of processes that route to these workers. Each knows its own requests;
            of the others' it knows what workers report, and assumes as many as its own before.
        front_end: number of this process.
        seed: policies that draw: seed of the random numbers.
        lockstep: the workers meet at a barrier in each step, as the ranks of one engine do, and
            decisions wait until all have told of it. False, for workers that do not wait for each
            other: a decision with each event, so that no slot waits.
        greedy_slots: `br0`, `brh`: with more free slots in total than this, requests are bound one
            by one. Not published: 1 reproduces the published imbalances; BF-IO's code has 7.
        subset: `br0`, `brh`: number of waiting requests of which a worker takes the best subset, 1
            to 16.
        candidates: `br0`, `brh`: number of waiting requests that are considered one by one.
        horizon: `brh`: steps ahead.
        alpha: `brh`: weight of the load.
        beta: `brh`: cost of overflow; 0: the number of workers.
        gamma: `brh`: weight of a step relative to the one before; above 0, at most 1.
        points: `fast_phi`: points of the distribution of outputs.
        window: `fit`: number of waiting requests to choose from.
        wait_bonus: `fit`: what a step of waiting is worth, in mean sizes of the requests that wait:
            after 80 steps, with 0.0125, a request counts as nearer by one of them. Half of
            what exceeds eight times the mean wait of those that were bound counts by its square,
            too. More is fairer, less is more even.
        slack: `fit`: how far above the mean load, or above its share of it if it has more slots or
            KV cache than others, a worker still takes requests, in standard deviations of the
            loads. Above 1.4 it has no effect on up to three workers that are alike.
        overshoot: `fit`: what a token above the level costs, in tokens below it, times the number
            of workers; at least as much as one below, and at the fullest worker at least as
            much as one below for each worker.
        prompt_weight: `fit`: cost of computing a prompt token, in KV tokens read in one step; 0:
            workers do not compute prompts, or their cost is ignored; None: fitted to the times of
            steps, where the router has a clock and the workers are in lockstep, and 0 elsewhere.
        prefill_wait: `fit` with `lockstep`, unless `prompt_weight` is 0: requests wait, so that
            workers compute prompts in the same step, until the wait costs this many times a prompt
            computed alone; 0: they do not wait.
    """

    name: str = "fit"
    when_full: WhenFull = WhenFull.QUEUE
    predictor: Predictor = Predictor.SURVIVAL
    front_ends: int = 1
    front_end: int = 0
    seed: int = 0
    lockstep: bool = True
    greedy_slots: int = 1
    subset: int = 4
    candidates: int = 1024
    horizon: int = 80
    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.96
    points: int = 5
    window: int = 1024
    wait_bonus: float = 0.0125
    slack: float = 1.5
    overshoot: float = 0.1
    prompt_weight: float | None = None
    prefill_wait: float = 1.0

    @property
    def info(self) -> PolicyInfo:
        """The description of the policy. Raises PolicyError for an unknown name."""
        if self.name not in POLICIES:
            raise PolicyError(f"no policy is called {self.name!r}: there are {', '.join(POLICIES)}")
        return POLICIES[self.name]

    def native(self) -> _native.PolicySettings:
        """Converts to the native settings. Raises PolicyError for a value of another type."""
        settings = _native.PolicySettings()
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                setattr(settings, field.name, value.value if isinstance(value, Enum) else value)
            except TypeError as error:
                raise PolicyError(f"{field.name}: {value!r} is not what it takes") from error
        return settings
