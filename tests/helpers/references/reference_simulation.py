"""The simulator, in plain Python: every figure is counted anew at every step.

Written from docs/design/request-balance.md and the words of `Scenario` and `Cluster`, not from
csrc. A step: requests arrive; those that time out are aborted; front ends are told, workers
report, policies decide; workers admit; the step happens. Left to choice, and taken as the native
one does: requests that end in one step end by number of worker, then those that decoded before
those whose prompt was computed, the former by number (with drafts: in the order in which they
began).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import Protocol, TypeAlias

from helpers.references.reference_random import Dice
from helpers.references.reference_routing_rules import slow_front

from equipoise.balancer.requests.catalogue import PrefillRule
from equipoise.balancer.requests.policy import Capacity, WorkerReport
from equipoise.balancer.requests.policy_settings import RoutingPolicySettings
from equipoise.balancer.requests.simulation import BACKLOG_PER_WORKER, SaturatedArrivals, Scenario
from equipoise.balancer.requests.workload import Workload


class Front(Protocol):
    """What a simulation needs of a front end."""

    def arrive(
        self, name: int, size: int, pinned: int | None, hits: Sequence[int], expected: int | None
    ) -> None: ...
    def grow(self, name: int, tokens: int) -> None: ...
    def finish(self, name: int) -> None: ...
    def abort(self, name: int) -> None: ...
    def report(self, worker: int, report: WorkerReport) -> None: ...
    def count_steps_by_caller(self) -> None: ...
    def dispatch(self) -> list[tuple[int, int]]: ...


MakeFront: TypeAlias = Callable[[RoutingPolicySettings, Sequence[Capacity]], Front]


@dataclass(eq=False)
class SlowJob:
    """A request; `missing` tokens of it have to be computed before it makes one more."""

    number: int
    prompt: int
    output: int
    arrival: float
    blocks: list[int]
    state: str = "ahead"
    made: int = 0
    missing: int = 0
    worker: int = -1
    admitted: float = -1.0
    admitted_step: int = -1
    first: float = -1.0
    end: float = -1.0
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.made


@dataclass(eq=False)
class SlowServer:
    """`active` by admission, `running` by when they began to decode."""

    slots: int
    queue: list[SlowJob] = field(default_factory=list)
    active: list[SlowJob] = field(default_factory=list)
    running: list[SlowJob] = field(default_factory=list)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    may_admit: bool = True
    may_compute: bool = True
    behind: bool = False

    @property
    def held_tokens(self) -> int:
        return sum(job.tokens for job in self.active)

    @property
    def load(self) -> int:
        return self.held_tokens - sum(job.missing for job in self.active)

    def cached(self, blocks: list[int]) -> int:
        hits = [block in self.cache for block in blocks]
        return hits.index(False) if False in hits else len(hits)

    def keep(self, blocks: list[int], most: int) -> None:
        """The first block is the one used last, so that it stays longest."""
        for block in reversed(blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > most:
            self.cache.popitem(last=False)


@dataclass
class Record:
    """What `StepSeries` has, by step."""

    clock: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)
    sum: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    loads: list[list[int]] = field(default_factory=list)


class SlowSimulation:
    """`run` it; then `jobs` and `record` say what happened."""

    def __init__(
        self, workload: Workload, scenario: Scenario, make: MakeFront = slow_front
    ) -> None:
        self.make_front = make
        self.workload, self.scenario, self.cluster = workload, scenario, scenario.cluster
        self.room = inf if self.cluster.kv_tokens is None else self.cluster.kv_tokens
        self.chunk = self.cluster.prefill.chunk if self.cluster.prefill else 0
        self.blocks = self.cluster.prefill.cached_blocks if self.cluster.prefill else 0
        self.saturated = isinstance(scenario.arrivals, SaturatedArrivals)
        self.delayed = self.batched = self.aligned_steps = 0
        self.clock, self.next_front_end_update, self.next_report = 0.0, 0.0, 0.0
        self.dice, self.record = Dice(scenario.seed), Record()
        self.servers = [SlowServer(slots) for slots in self.cluster.worker_slots]
        self.jobs = [self.job(i) for i in range(workload.count)]
        self.ahead = list(self.jobs)
        self.fronts = [self.front(i) for i in range(scenario.front_ends)]
        self.untold: list[list[tuple[str, SlowJob, int]]] = [[] for _ in self.fronts]

    def job(self, number: int) -> SlowJob:
        load, times = self.workload, self.workload.arrivals
        arrival = 0.0 if times is None or self.saturated else float(times[number])
        blocks = [] if load.hashes is None else [int(b) for b in load.block_hashes_of(number)]
        return SlowJob(
            number, int(load.prompts[number]), int(load.outputs[number]), arrival, blocks
        )

    def front(self, number: int) -> Front:
        seed = (self.scenario.seed * 1000003 + number) % 2**64
        ends = self.scenario.front_ends
        settings = replace(self.scenario.policy, front_ends=ends, front_end=number, seed=seed)
        capacities = [
            Capacity(slots=slots, kv_tokens=self.cluster.kv_tokens)
            for slots in self.cluster.worker_slots
        ]
        front = self.make_front(settings, capacities)
        front.count_steps_by_caller()
        return front

    def run(self) -> "SlowSimulation":
        while any(job.state not in ("finished", "failed") for job in self.jobs):
            self.reveal()
            self.abort_timed_out()
            self.reveal()
            self.tell()
            self.report()
            self.decide()
            self.align()
            for server in self.servers:
                if server.may_admit:
                    self.admit(server)
            self.note_queues()
            if any(server.active for server in self.servers):
                self.step()
            elif any(job.state in ("ahead", "waiting") for job in self.jobs):
                self.skip()
        return self

    @property
    def waiting(self) -> list[SlowJob]:
        return [job for job in self.jobs if job.state == "waiting"]

    def reveal(self) -> None:
        arrivals = self.scenario.arrivals
        backlog = BACKLOG_PER_WORKER * self.cluster.workers
        if isinstance(arrivals, SaturatedArrivals):
            backlog = arrivals.backlog or backlog
        while self.ahead:
            if self.saturated and len(self.waiting) >= backlog:
                return
            if not self.saturated and self.ahead[0].arrival > self.clock:
                return
            self.arrive(self.ahead.pop(0))

    def arrive(self, job: SlowJob) -> None:
        job.arrival = self.clock if self.saturated else job.arrival
        if job.prompt > self.room:
            self.fail(job)
            return
        job.state = "waiting"
        block = self.workload.block
        hits = [server.cached(job.blocks) * block for server in self.servers] if self.blocks else []
        front = self.fronts[job.number % len(self.fronts)]
        front.arrive(job.number, job.prompt, None, hits, job.output)

    def fail(self, job: SlowJob) -> None:
        job.state, job.end = "failed", self.clock

    def abort_timed_out(self) -> None:
        for job in self.waiting:
            up = job.arrival + (self.scenario.queue_timeout or inf)
            if job.admitted < 0 and self.clock >= up:
                self.fronts[job.number % len(self.fronts)].abort(job.number)
                for server in self.servers:
                    server.queue = [other for other in server.queue if other is not job]
                self.fail(job)

    def tell(self) -> None:
        if self.clock < self.next_front_end_update:
            return
        self.next_front_end_update = self.clock + self.scenario.token_delay
        for front, events in zip(self.fronts, self.untold, strict=True):
            for kind, job, tokens in events:
                if kind == "grow":
                    front.grow(job.number, tokens)
                elif kind == "finish":
                    front.finish(job.number)
                else:
                    front.abort(job.number)
            events.clear()

    def say(self, kind: str, job: SlowJob, tokens: int = 0) -> None:
        self.untold[job.number % len(self.fronts)].append((kind, job, tokens))

    def report(self) -> None:
        if self.clock < self.next_report:
            return
        published = self.scenario.policy.info.report_interval
        every = self.scenario.report_interval
        self.next_report = self.clock + (published if every is None else every)
        for worker, server in enumerate(self.servers):
            queued = sum(job.tokens for job in server.queue)
            usage = server.held_tokens / self.room
            report = WorkerReport(
                waiting=len(server.queue),
                running=len(server.active),
                tokens=server.held_tokens + queued,
                kv_usage=usage,
            )
            for front in self.fronts:
                front.report(worker, report)

    def decide(self) -> None:
        for front in self.fronts:
            for number, worker in front.dispatch():
                self.jobs[number].worker = worker
                self.servers[worker].queue.append(self.jobs[number])

    def align(self) -> None:
        """By the words of `PrefillRule`."""
        prefill = self.cluster.prefill
        for server in self.servers:
            server.may_admit = server.may_compute = True
        if prefill is None or prefill.alignment is None:
            return
        limit = prefill.alignment.limit
        ready = [self.has_prompt(server) for server in self.servers]
        decoding = [bool(server.running) for server in self.servers]
        match prefill.alignment.rule:
            case PrefillRule.PREFILL_DELAYER:
                runs = any(server.active for server in self.servers)
                if any(ready) and not all(ready) and runs and self.delayed < limit - 1:
                    self.delayed += 1
                    self.hold(self.servers, compute=True)
                else:
                    self.delayed = 0
            case PrefillRule.SCHEDULE_INTERVAL:
                number, self.aligned_steps = self.aligned_steps, self.aligned_steps + 1
                if number % limit:
                    self.hold([s for s in self.servers if s.running and not s.behind])
            case PrefillRule.ATTENTION_DP:
                full = any(len(server.running) >= server.slots for server in self.servers)
                if all(ready) and not full:
                    self.delayed = 0
                    if all(decoding) and self.batched < 10:
                        self.batched += 1
                        self.hold(self.servers)
                    elif all(decoding):
                        self.batched = 0
                else:
                    self.delayed += 1
                    if all(decoding) and self.delayed < limit:
                        self.hold(self.servers)
                    else:
                        self.delayed = 0

    def has_prompt(self, server: SlowServer) -> bool:
        """One that is computed, or that could be admitted."""
        slot = server.queue and len(server.active) < server.slots
        admits = slot and server.held_tokens + server.queue[0].tokens <= self.room
        return bool(admits) or any(job.missing for job in server.active)

    def hold(self, servers: Sequence[SlowServer], compute: bool = False) -> None:
        for server in servers:
            server.may_admit, server.may_compute = False, compute

    def note_queues(self) -> None:
        """A worker with the permission that could not empty its queue."""
        for server in self.servers:
            if server.may_compute:
                server.behind = bool(server.queue)

    def admit(self, server: SlowServer) -> None:
        while server.queue and len(server.active) < server.slots:
            job = server.queue[0]
            if server.held_tokens + job.tokens > self.room:
                return
            server.queue.pop(0)
            server.active.append(job)
            job.state = "active"
            if job.admitted < 0:
                job.admitted, job.admitted_step = self.clock, len(self.record.clock)
            if not self.chunk:
                server.running.append(job)
                continue
            # The last token of a prompt is computed in any case.
            hit = min(server.cached(job.blocks) * self.workload.block, job.prompt - 1)
            job.missing = job.tokens - hit
            server.keep(job.blocks, self.blocks)

    def work(self, server: SlowServer) -> float:
        step = self.cluster.step
        computed = min(self.chunk_of(server), sum(job.missing for job in server.active))
        work = server.load + step.prompt_weight * computed
        return work * exp(step.noise * self.dice.normal()) if step.noise else work

    def chunk_of(self, server: SlowServer) -> int:
        return self.chunk if server.may_compute else 0

    def step(self) -> None:
        step, record = self.cluster.step, self.record
        work = [self.work(server) for server in self.servers]
        seconds = step.fixed + step.per_token * max(work)
        seconds += step.per_mean * sum(work) / len(work)
        record.clock.append(self.clock)
        record.seconds.append(seconds)
        record.largest.append(max(work))
        record.sum.append(sum(work))
        record.loads.append([server.load for server in self.servers])
        record.active.append(sum(len(server.active) for server in self.servers))
        self.clock += seconds
        record.tokens.append(sum(self.advance(server) for server in self.servers))
        record.waiting.append(len(self.waiting))

    def advance(self, server: SlowServer) -> int:
        """Decoding, then prompts, by what they had before the step; then there has to be room."""
        tokens_before = sum(job.made for job in self.jobs)
        computing = [job for job in server.active if job.missing]
        for job in self.by_end(server.running):
            self.make(server, job, self.drawn(job))
        chunk_left = self.chunk_of(server)
        for job in computing:
            computed = min(chunk_left, job.missing)
            chunk_left -= computed
            job.missing -= computed
            if not job.missing:
                server.running.append(job)
                self.make(server, job, 1)
        new_tokens = sum(job.made for job in self.jobs) - tokens_before
        self.make_room(server)
        return new_tokens

    def by_end(self, running: list[SlowJob]) -> list[SlowJob]:
        if self.cluster.drafting:
            return list(running)
        return sorted(running, key=lambda job: job.number)

    def drawn(self, job: SlowJob) -> int:
        """One token, and of the drafted ones those before the first that is not accepted."""
        tokens, drafting = 1, self.cluster.drafting
        if drafting is not None:
            while tokens <= drafting.tokens and self.dice.uniform() < drafting.acceptance:
                tokens += 1
        return min(tokens, job.output - job.made)

    def make(self, server: SlowServer, job: SlowJob, tokens: int) -> None:
        job.made += tokens
        job.first = self.clock if job.first < 0 else job.first
        self.say("grow", job, tokens)
        if job.made == job.output:
            job.state, job.end = "finished", self.clock
            server.active.remove(job)
            server.running.remove(job)
            self.say("finish", job)

    def make_room(self, server: SlowServer) -> None:
        """Who was admitted last goes back; who has no room alone fails."""
        while server.held_tokens > self.room:
            job = server.active.pop()
            if job in server.running:
                server.running.remove(job)
            if job.tokens > self.room or not server.active:
                self.fail(job)
                self.say("fail", job)
                continue
            job.state, job.missing = "waiting", 0
            job.preemptions += 1
            server.queue.insert(0, job)

    def skip(self) -> None:
        """Nothing runs, so time goes on to what happens next."""
        times = [self.ahead[0].arrival] if self.ahead and not self.saturated else []
        if any(self.untold):
            times.append(self.next_front_end_update)
        if self.waiting:
            times.append(self.next_report)
            times += [job.arrival + (self.scenario.queue_timeout or inf) for job in self.waiting]
        self.clock = min(time for time in times if time > self.clock)
