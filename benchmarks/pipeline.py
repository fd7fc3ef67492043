"""Does handing activations over cost a pipeline anything? Stages, one process each.

    python benchmarks/pipeline.py              all points on both links, 5 rounds: about an hour
    python benchmarks/pipeline.py --quick      a few points, two rounds, a minute: nothing is kept
    python benchmarks/pipeline.py --link emulated --hidden 7168    these alone: nothing is kept

A stage's compute is emulated (`pipeline_emulation.py` has every constant); messages really travel,
on two links: this machine's loopback interface, and an emulated link with a latency and a rate
between network namespaces. Where such a link is not permitted, one line says why, and a delay in
the communicator takes its place. Everybody who is compared (`handovers.py`) serves the same work on
the same link, in turns:

- throughput of micro-batches of one size, beside that of a pipeline without transfers;
- a closed loop of requests: end-to-end latency, time to first token, time per output token,
  inter-token latency, and throughput.

Four stages on two cores take turns; they are reported at one point. Writes
benchmarks/results/pipeline.json; `python benchmarks/performance.py` shows it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from evidence import save
from handovers import CONTESTANTS, WORD
from link_loopback import delayed, loopback
from link_place import Link
from link_tun import probe, tun
from pipeline_crew import Run, serve_all
from pipeline_emulation import HIDDEN, LINK, STAGES, TOKENS, Point, points
from pipeline_figures import Figures, link_figures
from pipeline_page import link_told, text
from pipeline_requests import Serving
from pipeline_work import Steady, Work

from equipoise.hal.capabilities import Unavailable

ROUNDS, FEWER = 5, 2
"""Of what is compared; of the yardstick, and where nothing is kept."""
MORE_STAGES = 4
SECONDS = 30.0
"""Of a run at most, on a machine that has other things to do."""
QUICK = (Point(4096, 1, 0.75), Point(4096, 256, 0.75))
CENTRE = Point(5120, 64, 0.75)
SCENARIO = Serving(hidden=7168, prompt=128, decode=16, concurrency=32, requests=64, ratio=0.75)
BRIEF = Serving(hidden=4096, prompt=64, decode=6, concurrency=12, requests=18, ratio=0.75)


@dataclass(frozen=True)
class Part:
    """What is measured on one link.

    Attributes:
        link: its name on the command line.
        stages: how many.
        works: what is served.
        rounds: in which all take turns.
    """

    link: str
    stages: int
    works: tuple[Work, ...]
    rounds: int

    def runs(self) -> list[Run]:
        """In order."""
        return [
            Run(work, system, turn)
            for work in self.works
            for turn in range(self.rounds)
            for system in turns(turn)
        ]


def turns(turn: int) -> list[str]:
    """Everybody in one round; it is another's turn to be the first in each."""
    names = list(CONTESTANTS)
    first = turn % len(names)
    return [n for n in names[first:] + names[:first] if n != WORD or turn < FEWER]


LINKS: dict[str, Callable[[int], AbstractContextManager[Link]]] = {
    "loopback": lambda ranks: loopback(),
    "emulated": lambda ranks: tun(ranks, LINK),
    "delayed": lambda ranks: delayed(LINK),
}
"""By name on the command line."""


def permitted(link: str) -> str:
    """The link, or the one that takes its place where it cannot be made; says why."""
    if link != "emulated":
        return link
    found = probe()
    if isinstance(found, Unavailable):
        sys.stderr.write(f"no emulated link here, so a delay in the HAL: {found.reason}\n")
        return "delayed"
    return link


def brief(links: Sequence[str]) -> list[Part]:
    """About a minute."""
    works = (*map(Steady, QUICK), BRIEF)
    return [Part(link, STAGES, works, FEWER) for link in links]


def whole(links: Sequence[str], hidden: Sequence[int], tokens: Sequence[int]) -> list[Part]:
    """Everything that is asked for, and four stages at one point."""
    swept = [p for p in points() if p.hidden in hidden and p.tokens in tokens]
    works = (*map(Steady, swept), SCENARIO)
    main = [Part(link, STAGES, works, ROUNDS) for link in links]
    return [*main, *(Part(link, MORE_STAGES, (Steady(CENTRE),), ROUNDS) for link in links)]


def measure(part: Part) -> Figures:
    """Serve all runs on a link; its figures."""
    runs = part.runs()
    with LINKS[part.link](part.stages) as link:
        told = serve_all(link, part.stages, runs, SECONDS * len(runs))
        asked = asdict(link.asked) if link.asked else None
        found = {"name": link.name, "stages": part.stages, "asked": asked}
    figures = {**found, "measured": told.link, **link_figures(runs, told, part.stages)}
    sys.stderr.write(f"{found['name']}, {part.stages} stages: served. {link_told(figures)}\n")
    return figures


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few points; not kept")
    parser.add_argument("--link", action="append", choices=LINKS, help="only this; not kept")
    parser.add_argument("--hidden", action="append", type=int, choices=HIDDEN, help="not kept")
    parser.add_argument("--tokens", action="append", type=int, choices=TOKENS, help="not kept")
    return parser.parse_args()


def main() -> None:
    """Do what the command line says."""
    chosen = arguments()
    links = [permitted(link) for link in chosen.link or ("loopback", "emulated")]
    selected = (chosen.hidden or HIDDEN, chosen.tokens or TOKENS)
    parts = brief(links) if chosen.quick else whole(links, *selected)
    figures: dict[str, Any] = {"links": [measure(part) for part in parts]}
    sys.stdout.write("\n".join(text(figures)) + "\n")
    if not (chosen.quick or chosen.link or chosen.hidden or chosen.tokens):
        save("pipeline", ["python", "benchmarks/pipeline.py"], figures)


if __name__ == "__main__":
    main()
