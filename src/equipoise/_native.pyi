"""The native core, in C++17: planner, migration plan, routing, host copies, requests, simulator.

Every array is C-contiguous and in host memory, of numpy or a CPU tensor of torch; `counts`,
`slots`, `start`, `replicas` and `cumulative` are written where the text says so. All integers:
the same input gives the same output on every machine. Every function releases the GIL, and
raises ValueError with one line when an array's shape, dtype, place or values do not fit.

Words: E experts, S slots, slot s lives on rank s // (S // ranks), shares have the denominator
65536. A routing table is `start` int32 [E + 1], `replicas` int32 [S], `cumulative` int32 [S], as
`equipoise.hal.routing.RoutingTable` says.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_Int32: TypeAlias = NDArray[np.int32] | Tensor
_Int64: TypeAlias = NDArray[np.int64] | Tensor
_Bytes: TypeAlias = NDArray[np.uint8] | Tensor | bytes | bytearray | memoryview

def plan_greedy(load: _Int64, slots: int, ranks: int) -> NDArray[np.int32]:
    """Placement, int32 [L, slots], for tokens per expert, int64 [L, E], none negative.

    The rule that DeepSeek's EPLB and TensorRT-LLM publish: each further slot goes to the largest
    load per copy (ties: larger id), then copies by size to the least loaded rank with a free slot.
    Loads per copy are compared exactly. `slots` is at least E and a multiple of `ranks`; a layer
    sums to less than 2**46.
    """

def plan(
    load: _Int64,
    windows: _Int64 | None,
    slots: int,
    capacity: _Int32,
    nodes: int,
    survive: int,
    installed: _Int32 | None,
    policy: int,
    aims: _Int32,
    allowance: _Int64,
    per_rank: int,
    threads: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Placement and shares, int32 [L, slots], moves and imbalance in 1 / 65536, int64 [L].

    `load` is int64 [L, E]; `windows` [W, L, E], at most 256 that sum to it, say how it varies.
    `capacity` [ranks] is in 1 / 65536 of an ordinary rank; with one below that a layer may have as
    much less load than 2**46. `survive`: 0 nothing, 1 the loss of a
    rank, 2 of a node. `policy`: 0 greedy, 1 connected, 2 incremental, which starts from `installed`
    [L, slots] and moves at most `allowance` [L] copies. `aims` [6]: target, slack, hysteresis, the
    cost of a copy between nodes and the deviations that a rank counts with, all in 1 / 65536, and
    1 to split experts evenly instead of by level shares. The algorithms stand in
    csrc/planning/plan_layers.h and the headers that it includes.
    """

def align(installed: _Int32, proposed: _Int32, ranks: int) -> NDArray[np.int32]:
    """`proposed` relabelled, int32 [L, S], so that few copies move and the balance is the same.

    Ranks are matched greedily by copies in common (ties: lower proposed, then lower installed
    rank), unless no relabelling keeps more; a copy that stays on its rank keeps its slot, the
    others fill the free slots by ascending expert.
    """

def count_moves(installed: _Int32, proposed: _Int32, ranks: int) -> int:
    """Copies in `proposed`, int32 [L, S], that their rank does not hold in `installed`."""

def solve_shares(
    counts: _Int64, placement: _Int32, ranks: int, sweeps: int = 16
) -> NDArray[np.int32]:
    """Shares by slot, int32 [L, S], that level the rank loads for `counts`, int64 [L, E].

    Water-filling by block coordinate descent; the largest rank is never above that of even
    shares. The shares of an expert sum to 65536. A layer sums to less than 2**46.
    """

def solve_cumulative(
    counts: _Int32 | _Int64,
    start: _Int32,
    replicas: _Int32,
    ranks: int,
    sweeps: int,
    cumulative: _Int32,
) -> None:
    """Like `solve_shares` for one layer, [E]: reads its table and writes `cumulative`."""

def build_table(
    placement: _Int32,
    shares: _Int32,
    experts: int,
    start: _Int32,
    replicas: _Int32,
    cumulative: _Int32,
) -> None:
    """Write the table of one layer from `placement` and `shares`, both int32 [S].

    Raises ValueError when an expert has no slot or its shares do not sum to 65536; what was written
    is then of no use.
    """

def build_tables(
    placement: _Int32,
    shares: _Int32,
    experts: int,
    start: _Int32,
    replicas: _Int32,
    cumulative: _Int32,
) -> None:
    """`build_table` for several layers; every array has a row for each."""

def digest_tables(start: _Int32, replicas: _Int32, cumulative: _Int32) -> NDArray[np.uint64]:
    """Of each layer's table, a row of every array, `checksum` of all its bytes in this order."""

def count_experts(ids: _Int32, counts: _Int32) -> None:
    """Write to `counts`, int32 [E], how often each expert occurs in `ids`, int32 [n]."""

def route_hashed(
    ids: _Int32,
    start: _Int32,
    replicas: _Int32,
    cumulative: _Int32,
    rank: int,
    layer: int,
    step: int,
    slots: _Int32,
    counts: _Int32,
) -> None:
    """Write `slots`, int32 [n], and `counts`, int32 [E], of `ids`, int32 [n].

    Semantics: `equipoise.hal.routing.route_hashed`.
    """

def route_apportioned(
    ids: _Int32,
    start: _Int32,
    replicas: _Int32,
    cumulative: _Int32,
    rank: int,
    layer: int,
    slots: _Int32,
    counts: _Int32,
) -> None:
    """Write `slots`, int32 [n], and `counts`, int32 [E], of `ids`, int32 [n].

    Semantics: `equipoise.hal.routing.route_apportioned`.
    """

def route_levelled(
    ids: _Int32,
    start: _Int32,
    replicas: _Int32,
    ranks: int,
    rank: int,
    layer: int,
    slots: _Int32,
    counts: _Int32,
    total: _Int32 | None = None,
    before: _Int32 | None = None,
) -> None:
    """Write `slots`, int32 [n], and `counts`, int32 [E], of `ids`, int32 [n].

    Semantics: `equipoise.hal.levelled_routing.route_levelled`; `total` and `before` are the counts
    of a group, int32 [E] each.
    """

def deal_rows(counts: _Int32, ranks: int, seed: int, dealt: _Int32) -> None:
    """Write `dealt`, int32 [L, ranks, E]: rows of `counts`, int32 [L, E], each to a rank at random.

    The same seed gives the same rows; `ranks` is at most 65,536, and the odds of a rank are within
    1 / 65536 of 1 / ranks.
    """

def levelled_rows(
    counts: _Int32,
    start: _Int32,
    replicas: _Int32,
    ranks: int,
    layer: int,
    groups: bool,
    rows: _Int64,
) -> None:
    """Write `rows`, int64 [S]: what slots get of batches with `counts`, int32 [B, E].

    The same as `route_levelled` gives batch i of rank i, summed; `groups`: batch i is that of
    group i. The ids themselves are not needed, nor are slots assigned.
    """

def levelled_group_rows(
    counts: _Int32,
    start: _Int32,
    replicas: _Int32,
    ranks: int,
    group: int,
    layer: int,
    rows: _Int64,
) -> None:
    """Write `rows`, int64 [M, S]: what each member of a group sends to each slot.

    `counts`, int32 [M, E], are those of the group's members, in their order; their sum is below
    2**31. Semantics: `equipoise.hal.levelled_routing.group_rows`.
    """

def route_by_row_hash(
    ids: _Int32,
    start: _Int32,
    replicas: _Int32,
    top_k: int,
    rows: int,
    slots: _Int32,
    counts: _Int32,
) -> None:
    """Write `slots`, int32 [n], and `counts`, int32 [E], of `ids`, int32 [n].

    Semantics: `equipoise.hal.routing_rules.route_by_row_hash`.
    """

def route_by_block_turns(
    ids: _Int32, start: _Int32, replicas: _Int32, offset: int, slots: _Int32, counts: _Int32
) -> None:
    """Write `slots`, int32 [n], and `counts`, int32 [E], of `ids`, int32 [n].

    Semantics: `equipoise.hal.routing_rules.route_by_block_turns`.
    """

def checksum(data: _Bytes) -> int:
    """Checksum below 2**64 of bytes, uint8 [n]; semantics: `equipoise.hal.checksum`."""

def store_release_system(word: _Int32, value: int) -> None:
    """Store into an int32 [1] after all stores that came before, as other processors and devices
    see them."""

def plan_migration(
    installed: _Int32,
    proposed: _Int32,
    order: _Int32,
    experts: int,
    ranks: int,
    nodes: int,
    staging: int,
    message_slots: int,
) -> tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
]:
    """The migration plan from `installed` to `proposed`, both int32 [L, S].

    `order` [n] names every layer that changes, once. A rank has `staging` buffers, a message has at
    most `message_slots` slots. Returns six arrays of int32:

    moves [6 * M], one run each for layer, slot, expert, source slot, staging buffer and round of
    its chunk (-1: within a rank), sorted by chunk, rank of the slot, round, layer and slot;
    arrivals [chunks * ranks + 1]: where those of a chunk and rank begin;
    departures: the moves between ranks, by chunk, rank of the source, round, layer and slot;
    leaving [chunks * ranks + 1]: where those of a chunk and rank begin in departures;
    chunks [chunks + 1]: where each begins in `order`; rounds [chunks]: how many each has.

    The rules stand in csrc/migration/migration_plan.h. Raises ValueError also where a layer that
    changes is not in `order`, an expert is proposed that its layer does not hold, or a layer fills
    more slots of a rank than `staging`.
    """

class CopyThreads:
    """Threads that copy host memory; the semantics are in csrc/host_copy/copy_threads.h.

    `cpus` lists, for each thread, the CPUs it may run on: an empty list leaves it unpinned. Chunks
    are of at most `chunk` bytes, a multiple of 64; all threads together begin at most `rate` bytes
    a second, where that is not 0. Raises RuntimeError when a thread cannot be started or pinned.
    """

    def __init__(self, cpus: list[list[int]], chunk: int, rate: float) -> None:
        """Start the threads."""

    def submit(self, copies: NDArray[np.int64]) -> CopyTicket:
        """Begin to copy `copies`, int64 [n, 3] of source and destination address and bytes.

        The memory is the caller's to keep until the ticket is no longer pending. Raises ValueError
        before any effect, also where a destination overlaps a source, another destination, or
        memory that a pending ticket reads or writes.
        """

    def close(self, seconds: float) -> int:
        """Let tickets end for up to `seconds`, then give them up; how many were given up.

        Raises RuntimeError if a thread stays within one chunk for 10 seconds more: then tickets
        that are pending stay so.
        """

class CopyTicket:
    """A list of copies under way."""

    def wait(self, seconds: float) -> int:
        """0 if it is pending after `seconds`, 1 once it is done, 2 once it was given up."""

class RequestRefused(ValueError):
    """What was said of a request cannot be so; nothing has happened."""

class WorkerRefused(ValueError):
    """What was said of a worker cannot be so; nothing has happened."""

class PolicySettings:
    """Which policy decides, and how; csrc/requests/policy.h says what each field means."""

    name: str
    when_full: str
    predictor: str
    front_ends: int
    front_end: int
    seed: int
    lockstep: bool
    greedy_slots: int
    subset: int
    candidates: int
    horizon: int
    alpha: float
    beta: float
    gamma: float
    points: int
    window: int
    wait_bonus: float
    slack: float
    overshoot: float
    prompt_weight: float | None
    prefill_wait: float

    def __init__(self) -> None:
        """Defaults."""

class StepTimeFit:
    """What a prompt token weighs, by the times of steps; csrc/requests/step_time_fit.h."""

    def __init__(self) -> None:
        """No step yet."""

    def add(
        self, seconds: float, heaviest: tuple[float, float], computing: tuple[float, float]
    ) -> None:
        """A step: (load, prompt tokens) of the worker with the largest load, and of the one that
        computed most."""

    def prompt_weight(self) -> float:
        """KV tokens that are read in the time of computing a prompt token; 0: not known."""

class Router:
    """The router of one front end; requests have handles, workers numbers.

    `workers`: 1 to 65536.

    `slots` are requests that a worker has at once, `room` tokens in its KV cache. Raises
    ValueError for settings that make no sense; RequestRefused and WorkerRefused as they say.
    """

    def __init__(self, settings: PolicySettings, workers: int, slots: int, room: int) -> None:
        """All workers serve."""

    def arrive(self, size: int, worker: int, hits: list[int], expected: int) -> int:
        """A handle, used again once its request is gone; `worker`, `expected` -1: there is none."""

    def adopt(self, size: int, pin: int, worker: int, made: int) -> int:
        """A handle of a request that `worker` has already, with `made` tokens; `pin` -1: none."""

    def advance(self, requests: list[int], tokens: list[int], ended: list[int], now: float) -> None:
        """Requests made so many tokens each, then some ended, at `now`; nan: there is no clock."""

    def abort(self, request: int) -> None:
        """It is gone, wherever it was."""

    def lose(self, worker: int) -> list[int]:
        """The worker is lost; these requests are gone with it, its others are pooled again."""

    def add_worker(self, slots: int, room: int) -> int:
        """Its number."""

    def set_state(self, worker: int, state: str) -> None:
        """`serving` or `draining`."""

    def set_capacity(self, worker: int, slots: int, room: int) -> None:
        """From now on it has so much place."""

    def report(self, worker: int, waiting: int, running: int, tokens: int, kv_usage: float) -> None:
        """What a worker says of itself."""

    def count_steps_by_caller(self) -> None:
        """From now on a step ends with each call of `dispatch`, and not by what is told."""

    def dispatch(self) -> list[tuple[int, int]]:
        """Ends the step; (request, worker) that are to be sent now."""

    def dispatch_between_steps(self, arrival: bool) -> tuple[list[tuple[int, int]], bool]:
        """The same if no step is half told; and whether more is due when it is over."""

    def loads(self) -> list[int]:
        """KV tokens by worker."""

    def fitted_prompt_weight(self) -> float:
        """What a prompt token weighs by the times of steps, in KV tokens; 0: not known."""

    def counts(self) -> list[int]:
        """Requests by worker."""

    def pooled(self) -> int:
        """Requests that no worker has."""

class ServerSettings:
    """A simulated worker; csrc/simulation/simulated_worker.h says what each field means."""

    room: int
    prefill_chunk: int
    drafts: int
    acceptance: float

    def __init__(self) -> None:
        """Defaults."""

class SimulationSettings:
    """What is simulated; csrc/simulation/simulation.h says what each field means."""

    policy: PolicySettings
    server: ServerSettings
    workers: int
    slots: list[int]
    front_ends: int
    fixed: float
    per_token: float
    per_mean: float
    prompt_weight: float
    noise: float
    backlog: int
    report_interval: float
    token_delay: float
    queue_timeout: float
    cached_blocks: int
    block_tokens: int
    prefill_rule: str
    prefill_limit: int
    trajectory: int
    seed: int

    def __init__(self) -> None:
        """Defaults."""

class Simulation:
    """Workers in lockstep behind front ends with policies, and a clock.

    `prompts` and `outputs`: tokens; `arrivals`: seconds, not falling; all [n]. `hashes`: the
    blocks of all prompts, `offsets` [n + 1]: where each begins; or both are empty.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        prompts: _Int64,
        outputs: _Int64,
        arrivals: NDArray[np.float64],
        hashes: _Int64,
        offsets: _Int64,
    ) -> None:
        """Nothing has arrived. Raises ValueError for arrays or settings that do not fit."""

    def run(self, steps: int) -> bool:
        """Make up to so many steps; whether there is more to do.

        Raises ValueError where nothing can go on, which is an error of the policy.
        """

    def done(self) -> int:
        """Requests that have ended."""

    def fitted_prompt_weights(self) -> list[float]:
        """By front end, what its policy takes a prompt token to weigh by the times of steps."""

    def jobs(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """By request [n]: arrival, admitted, first, end in seconds, -1 where that never came;
        worker, admitted_step, preemptions, failed."""

    def steps(self) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
        """By step [k]: clock, seconds, ideal_seconds; largest and sum of the workers' work; tokens,
        active, waiting. And `loads`, [steps kept * workers]."""
