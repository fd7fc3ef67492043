"""The simulator's specification with one thing wrong each: the comparison has to notice."""

from dataclasses import dataclass
from typing import Any

from helpers.references.reference_simulation import SlowJob, SlowServer, SlowSimulation
from helpers.strategies.simulation_comparison import front_of

from equipoise.balancer.requests.simulation import SaturatedArrivals, Scenario
from equipoise.balancer.requests.workload import Workload


@dataclass(frozen=True)
class SimulationMutant:
    """`changes` in place of what `SlowSimulation`, or its servers, have."""

    broken: str
    changes: dict[str, object]
    of_servers: bool = False

    def run(self, workload: Workload, scenario: Scenario) -> SlowSimulation:
        simulation_changes = {} if self.of_servers else self.changes
        simulation = type("Broken", (SlowSimulation,), simulation_changes)(
            workload, scenario, front_of(scenario)
        )
        assert isinstance(simulation, SlowSimulation)
        if self.of_servers:
            server: Any = type("Broken", (SlowServer,), self.changes)
            simulation.servers = [server(one.slots) for one in simulation.servers]
        return simulation.run()


def _after_growth(self: SlowSimulation, server: SlowServer) -> float:
    return SlowSimulation.work(self, server) + len(server.running)


def _per_request(self: SlowSimulation, server: SlowServer) -> float:
    computed = sum(min(self.chunk, job.missing) for job in server.active)
    return server.load + self.cluster.step.prompt_weight * computed


def _one_more_slot(self: SlowSimulation, server: SlowServer) -> None:
    if server.queue and len(server.active) == server.slots and not self.chunk:
        job = server.queue.pop(0)
        job.state = "active"
        server.active.append(job)
        server.running.append(job)
    SlowSimulation.admit(self, server)


def _last_come(self: SlowSimulation, server: SlowServer) -> None:
    server.queue.reverse()
    SlowSimulation.admit(self, server)
    server.queue.reverse()


def _first_goes_back(self: SlowSimulation, server: SlowServer) -> None:
    if server.held_tokens > self.room:
        server.active.append(server.active.pop(0))
    SlowSimulation.make_room(self, server)


def _forgets_tokens(self: SlowSimulation, server: SlowServer) -> None:
    there = list(server.active)
    SlowSimulation.make_room(self, server)
    for job in there:
        job.made = 0 if job.state == "waiting" else job.made


def _to_the_tail(self: SlowSimulation, server: SlowServer) -> None:
    before = len(server.queue)
    SlowSimulation.make_room(self, server)
    back = len(server.queue) - before
    server.queue = server.queue[back:] + server.queue[:back]


def _never_stale(self: SlowSimulation) -> None:
    self.next_front_end_update = 0.0
    SlowSimulation.tell(self)


def _always_reported(self: SlowSimulation) -> None:
    self.next_report = 0.0
    SlowSimulation.report(self)


def _reported_first(self: SlowSimulation) -> None:
    SlowSimulation.decide(self)
    SlowSimulation.report(self)


def _endless_queue_timeout(self: SlowSimulation) -> None:
    return


def _stays_in_its_queue(self: SlowSimulation) -> None:
    queues = [list(server.queue) for server in self.servers]
    SlowSimulation.abort_timed_out(self)
    for server, queue in zip(self.servers, queues, strict=True):
        server.queue = queue


def _one_more_accepted(self: SlowSimulation, job: SlowJob) -> int:
    more = 1 if self.cluster.drafting else 0
    return min(SlowSimulation.drawn(self, job) + more, job.output - job.made)


def _arrivals_in_time(self: SlowSimulation) -> None:
    if isinstance(self.scenario.arrivals, SaturatedArrivals):
        SlowSimulation.reveal(self)
        return
    while self.ahead and self.ahead[0].arrival < self.clock + 1:
        self.arrive(self.ahead.pop(0))


def _counts_the_active(self: SlowSimulation) -> list[SlowJob]:
    return [job for job in self.jobs if job.state in ("waiting", "active")]


def _first_come_last_kept(self: SlowServer, blocks: list[int], most: int) -> None:
    for block in blocks:
        self.cache.setdefault(block, None)
    while len(self.cache) > most:
        self.cache.popitem(last=False)


def _any_block(self: SlowServer, blocks: list[int]) -> int:
    return sum(block in self.cache for block in blocks)


def _computed_counts(self: SlowServer) -> int:
    return self.held_tokens


def _also_holds_chunks(self: SlowSimulation, servers: Any, compute: bool = False) -> None:
    SlowSimulation.hold(self, servers)


def _holds_admissions_only(self: SlowSimulation, servers: Any, compute: bool = False) -> None:
    SlowSimulation.hold(self, servers, compute=True)


def _holds_for_ever(self: SlowSimulation) -> None:
    self.delayed = min(self.delayed, 0)
    SlowSimulation.align(self)


def _never_batches(self: SlowSimulation) -> None:
    self.batched = 10
    SlowSimulation.align(self)


MUTANTS = (
    SimulationMutant("chunks under way are delayed", {"hold": _also_holds_chunks}),
    SimulationMutant("chunks under way go on", {"hold": _holds_admissions_only}),
    SimulationMutant("prompts are held without a limit", {"align": _holds_for_ever}),
    SimulationMutant("prompts do not gather once all have one", {"align": _never_batches}),
    SimulationMutant("a full queue is held back, too", {"note_queues": _endless_queue_timeout}),
    SimulationMutant("loads are taken after the step", {"work": _after_growth}),
    SimulationMutant("a chunk is for each request", {"work": _per_request}),
    SimulationMutant("there is a slot more", {"admit": _one_more_slot}),
    SimulationMutant("who came last is admitted first", {"admit": _last_come}),
    SimulationMutant("who was admitted first goes back", {"make_room": _first_goes_back}),
    SimulationMutant("who goes back loses its tokens", {"make_room": _forgets_tokens}),
    SimulationMutant("who goes back goes to the tail", {"make_room": _to_the_tail}),
    SimulationMutant("front ends know everything at once", {"tell": _never_stale}),
    SimulationMutant("reports are always new", {"report": _always_reported}),
    SimulationMutant("decisions come before reports", {"report": _reported_first}),
    SimulationMutant("no request times out", {"abort_timed_out": _endless_queue_timeout}),
    SimulationMutant("who gave up stays in its queue", {"abort_timed_out": _stays_in_its_queue}),
    SimulationMutant("a draft more is accepted", {"drawn": _one_more_accepted}),
    SimulationMutant("requests come too early", {"reveal": _arrivals_in_time}),
    SimulationMutant("who is served still waits", {"waiting": property(_counts_the_active)}),
    SimulationMutant("blocks leave as they came", {"keep": _first_come_last_kept}, True),
    SimulationMutant("a block may be missing before a hit", {"cached": _any_block}, True),
    SimulationMutant("prompts weigh too early", {"load": property(_computed_counts)}, True),
)
