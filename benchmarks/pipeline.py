"""Does handing activations over cost a pipeline anything? Stages, one process each.

    python benchmarks/pipeline.py              all points on both links, 3 rounds: 15 minutes
    python benchmarks/pipeline.py --quick      two points, two rounds, a minute: nothing is kept
    python benchmarks/pipeline.py --link emulated --tokens 64    these alone: nothing is kept

A stage's compute is emulated (`lib/handovers.py` has every constant); messages really travel, on
two links: this machine's loopback interface, and an emulated link with a latency and a rate between
network namespaces. Where such a link is not permitted, one line says why. All who are compared
(`lib/handovers.py`, `lib/pipeline_rank.py`) serve the same micro-batches on the same link, in
turns; the throughput of each stands beside that of a pipeline without transfers.

Four stages on two cores take turns; they are reported at one point. Writes
benchmarks/results/pipeline.json; `python benchmarks/report.py` shows it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lib.handovers import (
    HIDDEN,
    STAGES,
    TOKENS,
    WARM,
    Point,
    message_bytes,
    points,
)
from lib.pipeline_links import Link, LinkSettings, loopback, probe, tun
from lib.pipeline_rank import BLOCKING, CONTESTANTS, COORDINATOR, HOST_AHEAD, OURS
from lib.processes import serve_on_ranks
from lib.results import Row, save, spread
from report import show

from equipoise.hal.capabilities import Unavailable
from equipoise.hal.communicator import Rendezvous

RANK = Path(__file__).parent / "lib" / "pipeline_rank.py"
LINK = LinkSettings(latency=8e-3, rate=400e6)
"""So much latency that small messages, too, take half of a stage and more; the rate is a third of
what the forwarder manages, so that two cores have time for the ranks."""
OPERATION_DEADLINE = 30.0
"""Seconds that a message may take."""
ROUNDS, FEWER = 3, 2
"""Of what is kept, and of a quick look."""
MORE_STAGES = 4
SECONDS = 30.0
"""Of a run at most, on a machine that has other things to do."""
QUICK = (Point(HIDDEN, 1, 0.75), Point(HIDDEN, 256, 0.75))
CENTRE = Point(HIDDEN, 64, 0.75)
PART, FASTER, LEAST, ABOVE = 0.95, 1.3, 0.97, 1.0
"""The bars, of two stages. Where a transfer takes half of compute or more: part of the
compute-bound rate at least, and over blocking where bytes take most of the transfer. Elsewhere:
over blocking. At every point: over the coordinator's pattern, whichever host plays it."""
HALF = 0.499
"""Part of compute that counts as half: some are asked for exactly that."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One pass over the micro-batches of a point."""

    point: Point
    system: str
    round: int


@dataclass(frozen=True)
class Part:
    """What is measured on one link: points, in rounds in which all take turns."""

    link: str
    stages: int
    points: tuple[Point, ...]
    rounds: int

    def runs(self) -> Iterator[Run]:
        """In order; it is another's turn to be the first in each round."""
        names = list(CONTESTANTS)
        for point in self.points:
            for turn in range(self.rounds):
                first = turn % len(names)
                for name in (*names[first:], *names[:first]):
                    yield Run(point, name, turn)


@dataclass(frozen=True)
class Record:
    """A run, as its first and its last stage saw it."""

    run: Run
    stages: Sequence[Figures]

    @property
    def rate(self) -> float:
        """Micro-batches per second, after those that fill the pipeline."""
        sampled: list[float] = self.stages[-1]["ended"][WARM:]
        return (len(sampled) - 1) / (sampled[-1] - sampled[0])


LINKS: dict[str, Callable[[int], AbstractContextManager[Link]]] = {
    "loopback": loopback,
    "emulated": lambda ranks: tun(ranks, LINK),
}
"""By name on the command line."""


def can_make_link(link: str) -> bool:
    """Whether the link can be made here; says why not."""
    availability = probe() if link == "emulated" else None
    if isinstance(availability, Unavailable):
        sys.stderr.write(f"no emulated link here: {availability.reason}\n")
        return False
    return True


def measure(part: Part) -> tuple[Row, list[Row]]:
    """Serve all runs on a link: what the link is, and a row for each point.

    Raises:
        RuntimeError: a stage was given something other than what the one before had sent.
    """
    runs = list(part.runs())
    with LINKS[part.link](part.stages) as link:
        tasks = [
            {
                "where": asdict(
                    Rendezvous(
                        rank=rank,
                        size=part.stages,
                        host=link.store[0],
                        port=link.store[1],
                        deadline=OPERATION_DEADLINE,
                    )
                ),
                "runs": [(asdict(run.point), run.system, run.round) for run in runs],
            }
            for rank in range(part.stages)
        ]
        rank_lines = serve_on_ranks(RANK, tasks, link.places, SECONDS * len(runs))
        name, settings = f"{part.stages} stages, {link.name}", link.settings
    link_figures = rank_lines[0][0]
    stages = zip(*(lines[1:] for lines in rank_lines), strict=True)
    records = [Record(run, each) for run, each in zip(runs, stages, strict=True)]
    for record in records:
        if wrong := sum(stage["wrong"] for stage in record.stages):
            raise RuntimeError(f"{record.run}: {wrong} wrong words")
    rows = [
        point_row(name, point, [r for r in records if r.run.point == point], link_figures)
        for point in part.points
    ]
    words = f"{settings.latency * 1e3:g} ms, {settings.rate / 1e6:,.0f} MB/s" if settings else ""
    link_row = {
        "link": name,
        "latency_ms": link_figures["latency"] * 1e3,
        "rate": link_figures["rate"] / 1e6,
        "asked": words,
    }
    sys.stderr.write(f"served: {link_row}\n")
    return link_row, with_verdicts(rows) if part.stages == STAGES else rows


def point_row(link: str, point: Point, records: Sequence[Record], link_figures: Figures) -> Row:
    """Throughput at one point; ratios are those of two runs of the same round."""
    nbytes = message_bytes(point.hidden, point.tokens)
    transfer, compute = dict(link_figures["seconds"])[nbytes], records[0].stages[0]["compute"]
    rates = {(record.run.system, record.run.round): record.rate for record in records}
    rounds = sorted({record.run.round for record in records})

    def rate_pair(system: str) -> list[float]:
        rate = spread(rates[system, turn] for turn in rounds)[0]
        return [rate, rate * compute]

    def over(base: str) -> list[float]:
        return spread(rates[OURS, turn] / rates[base, turn] for turn in rounds)

    return {
        "link": link,
        "hidden": point.hidden,
        "tokens": point.tokens,
        "asked": point.ratio,
        "megabytes": nbytes / 1e6,
        "transfer_ms": transfer * 1e3,
        "ratio": transfer / compute,
        "bound": 1.0 / compute,
        "bandwidth_bound": nbytes / link_figures["rate"] >= transfer / 2,
        **{system.replace(" ", "_"): rate_pair(system) for system in CONTESTANTS},
        "over_blocking": over(BLOCKING),
        "over_coordinator": over(COORDINATOR),
        "over_host_ahead": over(HOST_AHEAD),
    }


def with_verdicts(rows: Sequence[Row]) -> list[Row]:
    """The same with `met`: the bars that a point misses; a figure that is no number meets none."""
    verdict_rows = []
    for row in rows:
        # Where a transfer takes less, overlap gains less: blocking alone comes to
        # compute / (compute + transfer) of the compute-bound rate.
        weighty = row["ratio"] >= HALF
        required_ratio = FASTER if row["bandwidth_bound"] and weighty else LEAST
        checks = {
            "compute-bound rate": row[OURS][1] >= PART or not weighty,
            f"over {BLOCKING}": row["over_blocking"][0] >= required_ratio,
            f"over {COORDINATOR}": row["over_coordinator"][0] > ABOVE,
            f"over {HOST_AHEAD}": row["over_host_ahead"][0] > ABOVE,
        }
        wrong = [name for name, passed in checks.items() if not passed]
        verdict_rows.append({**row, "met": f"**no**: {', '.join(wrong)}" if wrong else "yes"})
    return verdict_rows


def figures(rows: Sequence[Row]) -> Row:
    """Points with a miss, by link."""
    by_link: Row = {}
    for link in dict.fromkeys(row["link"] for row in rows if "met" in row):
        of_link = [row for row in rows if row["link"] == link]
        weighty = sum(row["ratio"] >= HALF for row in of_link)
        by_link[link.removeprefix(f"{STAGES} stages, ")] = {
            "value": sum(row["met"] != "yes" for row in of_link),
            "note": f"of {len(of_link)}; a transfer takes half of compute or more at {weighty}",
        }
    return by_link


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few points; not kept")
    parser.add_argument("--link", action="append", choices=LINKS, help="only this; not kept")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="not kept")
    return parser.parse_args()


def main() -> None:
    """Do what the command line says."""
    options = arguments()
    links = [link for link in options.link or LINKS if can_make_link(link)]
    swept = tuple(point for point in points() if point.tokens in (options.tokens or TOKENS))
    if options.quick:
        parts = [Part(link, STAGES, QUICK, FEWER) for link in links]
    else:
        parts = [Part(link, STAGES, swept, ROUNDS) for link in links]
        parts += [Part(link, MORE_STAGES, (CENTRE,), ROUNDS) for link in links]
    measurements = [measure(part) for part in parts]
    rows = [row for _, each in measurements for row in each]
    tables = {"links": [link for link, _ in measurements], "points": rows}
    show("pipeline", figures(rows), tables)
    if links == list(LINKS) and not (options.quick or options.tokens):
        save("pipeline", ["python", "benchmarks/pipeline.py"], figures(rows), tables)


if __name__ == "__main__":
    main()
