"""The workloads that request policies are judged on.

Real traces are read from the folder that EQUIPOISE_TRACES names; without it, only what is generated
is run.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from equipoise.balancer.requests.cluster import Cluster
from equipoise.balancer.requests.comparison import Draw, Trial
from equipoise.balancer.requests.generators import generate
from equipoise.balancer.requests.simulation import Scenario
from equipoise.balancer.requests.traces import read_trace
from equipoise.balancer.requests.workload import Workload

TRACES = "EQUIPOISE_TRACES"
SEEDS = tuple(range(100, 105))
"""Not those that the settings of `fit` were chosen on, which were 0 to 4."""
MOONCAKE = "mooncake_conversation_trace.jsonl"
AZURE = "AzureLLMInferenceTrace_conv.csv"


@dataclass(frozen=True)
class Case:
    """A workload on a cluster; `trace` is its file, or None where it is generated."""

    title: str
    workers: int
    slots: int
    name: str
    count: int = 10_000
    trace: str | None = None

    def draw(self, seed: int) -> Workload:
        """Generated anew, or the trace's requests drawn with replacement."""
        if self.trace is None:
            return generate(self.name, self.count, seed)
        return trace(self.trace).resampled(seed)

    def trial(self, load: float | None = None, workers: int | None = None) -> Trial:
        """Five seeds, half of the step fixed; saturated, or at `load` of the capacity."""
        cluster = Cluster(workers=workers or self.workers, slots=self.slots)
        draw: Draw = self.draw
        return Trial(draw=draw, seeds=SEEDS, scenario=Scenario(cluster=cluster), load=load)


PUBLISHED = Case("prop, 8 workers x 72 slots", 8, 72, "prop", 32_000)
"""The replication of BalanceRoute's table. With its 8,000 requests the imbalance of round_robin, by
which all are divided, varies by a tenth between sets of five seeds; so four times as many."""
CASES = (
    Case("Mooncake conversation, 8 x 16", 8, 16, "mooncake", trace=MOONCAKE),
    Case("prop, 8 x 32", 8, 32, "prop"),
    Case("Azure 2023 conversation, 16 x 64", 16, 64, "azure", trace=AZURE),
    Case("reason, 16 x 32", 16, 32, "reason", count=3_000),
    Case("reason, 16 x 32, three times as long", 16, 32, "reason"),
)
"""The fourth has as many requests as the table that the project started from; the longest outputs,
of 32,768 tokens, have hardly ended when it does. So the fifth: what comes then."""


def folder() -> Path | None:
    """Of the traces, if anybody named one."""
    named = os.environ.get(TRACES)
    return Path(named) if named else None


@cache
def trace(name: str) -> Workload:
    """A file of that folder."""
    where = folder()
    assert where is not None, f"{TRACES} names the folder of {name}"
    return read_trace(where / name)


def runnable() -> tuple[Case, ...]:
    """Those that can be run here."""
    return tuple(case for case in CASES if case.trace is None or folder() is not None)
