"""The simulated cluster: workers in lockstep, the time of their steps, and published step times."""

from dataclasses import dataclass, field, replace

from equipoise.balancer.requests.catalogue import PrefillRule
from equipoise.balancer.requests.workload import Workload
from equipoise.hal.errors import UsageError

PER_TOKEN = 1e-7
"""Seconds to read one token of KV cache, all layers: a 576-wide latent cache of
61 layers at about 1 TB/s (dp-routing figures of BF-IO: 1.005e-7)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: fixed + per_token * largest work + per_mean * mean work.

    The work of a worker is its KV tokens, and `prompt_weight` for each prompt token that it
    computes in the step. All in seconds but `prompt_weight`, and `noise`: the sigma of a
    lognormal factor on the work of each worker and step, drawn anew.
    """

    fixed: float = 0.0
    per_token: float = PER_TOKEN
    per_mean: float = 0.0
    prompt_weight: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed", "per_token", "per_mean", "prompt_weight", "noise"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UsageError(f"step time: {name} must be at least 0, got {value}")
        if self.fixed + self.per_token <= 0:
            raise UsageError("step time: a step that takes no time cannot be simulated")

    def seconds(self, load: float) -> float:
        """Returns the seconds of a step in which every worker has `load` tokens."""
        return self.fixed + (self.per_token + self.per_mean) * load


@dataclass(frozen=True)
class PrefillAlignment:
    """A rule, and its limit in steps: how long prompts may be held back, or the interval."""

    rule: PrefillRule
    limit: int

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 1_000_000:
            raise UsageError(f"prefill alignment: a limit is 1 to 1000000 steps, got {self.limit}")


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Workers compute prompts themselves, in chunks, in the same steps as decoding.

    Attributes:
        chunk: maximum number of prompt tokens per step.
        cached_blocks: prompt blocks in a worker's prefix cache, evicted least recently used first;
            0: no prefix cache.
        alignment: what keeps prompts of the workers in the same steps; None: nothing.
    """

    chunk: int = 8192
    cached_blocks: int = 0
    alignment: PrefillAlignment | None = None

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.cached_blocks < 0:
            raise UsageError(f"prefill: a chunk is at least 1, cached blocks are 0 or more: {self}")


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding: `tokens` drafts per step, each accepted with probability `acceptance`
    if those before it were."""

    tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.acceptance <= 1:
            raise UsageError(f"drafting: at least 1 token, accepted with 0 to 1: {self}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of workers that are alike, but for their slots.

    Attributes:
        workers: number of workers.
        slots: maximum number of running requests of every worker, or of each.
        kv_tokens: KV cache of a worker in tokens; None: unbounded. A worker with a full cache
            preempts the request that it admitted last, to the head of its queue.
        step: time of a step.
        prefill: None if prompts arrive computed (disaggregated prefill).
        drafting: None without speculative decoding.
    """

    workers: int = 8
    slots: int | tuple[int, ...] = 32
    kv_tokens: int | None = None
    step: StepTime = field(default_factory=StepTime)
    prefill: Prefill | None = None
    drafting: Drafting | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 65_536:
            raise UsageError(f"workers must be 1 to 65536, got {self.workers}")
        if len(self.worker_slots) != self.workers:
            raise UsageError(f"{len(self.worker_slots)} numbers of slots, {self.workers} workers")
        for slots in self.worker_slots:
            if not 1 <= slots <= 65_536:
                raise UsageError(f"slots must be 1 to 65536, got {slots}")
        if self.kv_tokens is not None and self.kv_tokens < 1:
            raise UsageError(f"kv_tokens must be at least 1, got {self.kv_tokens}")

    @property
    def worker_slots(self) -> tuple[int, ...]:
        """Maximum number of running requests by worker."""
        return (self.slots,) * self.workers if isinstance(self.slots, int) else self.slots

    @property
    def total_slots(self) -> int:
        """Maximum number of running requests of all workers."""
        return sum(self.worker_slots)

    def full_load(self, workload: Workload) -> float:
        """Returns the mean KV tokens of a worker with all slots taken, over a long run.

        Of workers with different slots it is the mean: what each has in perfect balance.

        A request weighs s + o / 2 in the mean of the o steps for which it has a slot.
        """
        outputs = workload.outputs.astype(float)
        weights = workload.prompts + outputs / 2
        slots = self.total_slots / self.workers
        return float(slots * (outputs * weights).sum() / outputs.sum())

    def capacity(self, workload: Workload) -> float:
        """Returns the highest rate in requests per second: all slots taken, perfectly balanced."""
        seconds = self.step.seconds(self.full_load(workload))
        return float(self.total_slots / (seconds * workload.outputs.mean()))


def with_fixed_share(cluster: Cluster, workload: Workload, share: float) -> Cluster:
    """Returns `cluster` with a fixed step time that is `share` of a step at full load.

    Raises UsageError unless 0 <= share < 1.
    """
    if not 0 <= share < 1:
        raise UsageError(f"the fixed share of a step must be at least 0 and below 1, got {share}")
    reading = replace(cluster.step, fixed=0.0).seconds(cluster.full_load(workload))
    return replace(cluster, step=replace(cluster.step, fixed=reading * share / (1 - share)))


DYNTRALB_FIXED, DYNTRALB_BLOCK, DYNTRALB_BLOCK_TOKENS = 20_000, 19.2, 128
"""Cost of a step, cost of a block, tokens of a block; the first two in the same arbitrary unit."""
BLOG_MEAN = 0.5
"""Time per mean token over time per largest token."""


def published_step_time(name: str, slots: int, per_token: float = PER_TOKEN) -> StepTime:
    """Returns the published step time `name`: one of `STEP_MODELS` except `share`.

    `bfio` is that of the simulator of BF-IO (arXiv 2601.17855), in seconds; it has its own rate and
    depends on `slots`. `blog` is that of DP-BalanceRouter, at the ratio that it calls realistic.
    `dyntralb` is the cost of vllm-ascend's PR 12292, in its own unit per block of 128 tokens. The
    last two are scaled to `per_token` seconds.

    Raises UsageError for another name.
    """
    if name == "bfio":
        fixed = (slots * 0.6e-3 + 35e-3) / 16
        return StepTime(fixed=fixed, per_token=1.5 * 2 * 576 * 61e-6 / 2**20)
    if name == "blog":
        return StepTime(per_token=per_token, per_mean=BLOG_MEAN * per_token)
    if name == "dyntralb":
        tokens = DYNTRALB_FIXED / (DYNTRALB_BLOCK / DYNTRALB_BLOCK_TOKENS)
        return StepTime(fixed=tokens * per_token, per_token=per_token)
    raise UsageError(f"no published step time is called {name!r}")
