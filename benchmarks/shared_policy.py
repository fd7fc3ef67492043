"""What several front ends cost, with a policy of their own each and with one for all.

    python benchmarks/shared_policy.py
    python benchmarks/shared_policy.py --quick     one seed; nothing is kept

Eight front ends, each a dispatcher as in vLLM's API servers, route a closed loop of clients to
eight workers in lockstep with 16 slots each, by `fit`; four requests wait for each worker. Workers
tell each front end of its requests' tokens in a message of its own, in any order. Everything runs
in one process, on a clock wound by hand: a seed gives the same figures everywhere.

- one: one front end.
- shared: eight, one policy.
- reports: eight, a policy each; the others' requests are known from reports, every 100 ms.
- late one, late shared: one and eight where every message to and from the policy takes a step.
- uneven: eight, of which seven are so late, and one is not.

Outputs are shortened so that a run takes seconds. Imbalance is workers x largest - sum of the
workers' KV tokens, mean over the steps with at least nine of ten slots taken, without the first and
the last of them.

Then what a step costs the process that has the policy: 1,024 requests run on eight workers, and
each worker tells each of eight front ends of its tokens. CPU time, with JSON, without the socket.

Writes benchmarks/results/shared_policy.json; `python benchmarks/report.py` shows it.
"""

import argparse
import json
import sys
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
from lib.lockstep_front_ends import STEP_SECONDS, Fleet, FrontEnds, Sharing, Turns
from lib.results import Row, save, spread
from report import show

from equipoise.balancer.requests.policy_factory import routing_policy_factory
from equipoise.balancer.requests.policy_messages import VERSION
from equipoise.balancer.requests.policy_server import FrontEndSession, PolicyServer
from equipoise.balancer.requests.workload import Workload
from equipoise.balancer.requests.workload_generators import generate

FRONT_ENDS, REQUESTS = 8, 1000
SHORTER = {"prop": 20, "az24": 20, "reason": 40, "sharegpt": 5}
"""By workload, what outputs are divided by."""
SEEDS = 11, 12, 13
SCENARIOS = {
    "one": FrontEnds(1, Sharing.REPORTS),
    "shared": FrontEnds(FRONT_ENDS),
    "reports": FrontEnds(FRONT_ENDS, Sharing.REPORTS),
    "late_one": FrontEnds(1, link_seconds=STEP_SECONDS),
    "late_shared": FrontEnds(FRONT_ENDS, link_seconds=STEP_SECONDS),
    "uneven": FrontEnds(FRONT_ENDS, link_seconds=STEP_SECONDS, prompt_links=1),
}
BASES = {"shared": "one", "reports": "one", "late_shared": "late_one", "uneven": "late_one"}
"""What each is compared with."""


def requests_of(name: str, seed: int) -> Workload:
    """The requests of a run."""
    drawn = generate(name, REQUESTS, seed)
    return replace(drawn, outputs=np.maximum(drawn.outputs // SHORTER[name], 1))


def imbalance(scenario: FrontEnds, workload: Workload, seed: int) -> float:
    """In thousand tokens."""
    return Fleet(scenario, seed).serve(workload).imbalance(scenario.slots) / 1000


class DiscardLink:
    """A link whose messages are written as JSON, and go nowhere."""

    def send(self, message: Any) -> None:
        """As `Link`."""
        json.dumps(message)

    def close(self) -> None:
        """As `Link`."""


def step_cost(slots: int = 128, steps: int = 50) -> float:
    """CPU milliseconds of a step at the process that has the policy."""
    workers, clock = 8, Turns()
    policy = routing_policy_factory("fit", {})([slots] * workers, [None] * workers)
    names = [str(number) for number in range(workers)]
    server = PolicyServer(policy, names, clock, print)
    sessions = [server.connect(DiscardLink()) for _ in range(FRONT_ENDS)]
    for session in sessions:
        session.receive(["hello", VERSION, None])
        for number, name in enumerate(names):
            session.receive(["worker", number, name, None, None, "serving"])
    dice = np.random.default_rng(0)
    for number in range(workers * slots):
        front_end = int(dice.integers(FRONT_ENDS))
        sessions[front_end].receive(["arrive", number, 900, None, None, None])
    lines = [
        (session, json.dumps(["tokens", serials, [1] * len(serials), []]))
        for session in sessions
        for serials in by_worker(session, workers)
    ]
    began = process_time()
    for _ in range(steps):
        for session, line in lines:
            session.receive(json.loads(line))
            clock.turn()
    return (process_time() - began) / steps * 1000


def by_worker(session: FrontEndSession, workers: int) -> list[list[int]]:
    """Serials of the requests that each worker runs."""
    return [
        [one.serial for one in session.requests if one.worker == worker]
        for worker in range(workers)
    ]


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed; nothing is kept")
    quick = parser.parse_args().quick
    rows: list[Row] = []
    for name in SHORTER:
        seeds = SEEDS[:1] if quick else SEEDS
        values = {
            label: [imbalance(scenario, requests_of(name, seed), seed) for seed in seeds]
            for label, scenario in SCENARIOS.items()
        }
        row: Row = {"workload": name}
        for label, measured in values.items():
            row[label] = spread(measured)
        for label, base in BASES.items():
            row[f"{label}_ratio"] = sum(values[label]) / sum(values[base])
        rows.append(row)
    figures: Row = {label: max(row[f"{label}_ratio"] for row in rows) for label in BASES}
    figures["step_cost"] = spread(step_cost() for _ in range(1 if quick else 5))
    show("shared_policy", figures, {"workloads": rows})
    if not quick:
        command = ["python", "benchmarks/shared_policy.py"]
        save("shared_policy", command, figures, {"workloads": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
