"""Tries to catch every broken backend, many times, each from another seed.

    python -m npusim --schedule lazy -- python -m devices.conformance.trial --runs 20
    python -m npusim --schedule lazy -- python -m devices.conformance.trial --of nccl

A run catches a broken backend when the property that must reject it finds a violation, or when the
driver tells a fault. Prints a line for each, and how often the healthy backend was rejected by the
same properties, which must be never.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from devices.conformance.breakage import Breakage, Sound, planted

from equipoise.hal import registry
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.property import DeadlineLength
from equipoise.hal.conformance.search import PropertyViolated, SearchSettings, search
from equipoise.hal.conformance.subject import Subject

FAULTS = "NPUSIM_FAULTS"
KINDS = {
    "accelerator": "devices.conformance.broken_accelerators",
    "ascend": "devices.conformance.broken_backends",
    "ascend-kernels-and-slots": "devices.conformance.broken_ascend_kernels_and_slots",
    "cuda-slots": "cudasim.broken_slots",
    "nccl": "cudasim.broken_nccl_backends",
}
"""Modules that have the healthy backends of a kind as `SOUND`, its breakages as `BREAKAGES`, what
undoes them as `undone`, and a broken backend by the name of each."""
CASES = 400
"""Most cases of a run; it ends with the first violation."""
HEALTHY_CASES = 6
"""Of a run on the healthy backend."""
DEADLINES = {DeadlineLength.LONG: 1.5, DeadlineLength.SHORT: 1.0}
"""Seconds: a run that ends in a deadlock lasts so long."""


@dataclass(frozen=True)
class Score:
    """How often a backend was caught.

    Attributes:
        name: of the breakage, or of the property for the healthy backend.
        runs: how many runs.
        caught: in how many of them it was.
        clauses: which clauses it was said to violate.
        seconds: of all runs.
    """

    name: str
    runs: int
    caught: int
    clauses: tuple[str, ...]
    seconds: float


@contextmanager
def own_faults() -> Iterator[Path]:
    """Faults that are meant to happen go to a file of their own."""
    before = os.environ.get(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "faults"
        os.environ[FAULTS] = str(path)
        try:
            yield path
        finally:
            os.environ.pop(FAULTS)
            if before is not None:
                os.environ[FAULTS] = before


class Trial:
    """Tries broken backends of one kind, and the healthy one.

    Args:
        kind: whose.
    """

    def __init__(self, kind: str) -> None:
        self._module = KINDS[kind]
        self._planted: Any = import_module(self._module)
        self._sound: Sound = self._planted.SOUND
        self.breakages: Sequence[Breakage] = self._planted.BREAKAGES

    def broken(self, breakage: Breakage, runs: int) -> Score:
        """Try to catch it."""
        here = planted(breakage) if breakage.ranks == 1 else nullcontext()
        with own_faults() as faults, here:
            name = f"{self._module}:{breakage.name}"
            with closing(self._subject(name, breakage.ranks)) as tried:
                self._planted.undone.close()
                row = score(breakage.name, breakage.property, tried, range(runs), CASES, faults)
        if breakage.clause and set(row.clauses) - {breakage.clause}:
            return replace(row, caught=0)  # blamed for what it keeps
        return row

    def healthy(self, property_name: str, ranks: int, runs: int) -> Score:
        """The same property on the healthy backend."""
        with own_faults() as faults, closing(self._subject(self._sound.backend, ranks)) as tried:
            return score(property_name, property_name, tried, range(runs), HEALTHY_CASES, faults)

    def _subject(self, backend: str, ranks: int) -> Subject:
        """One device of this process, or rank processes with a backend by name."""
        if ranks == 1:
            return DeviceSubject(registry.accelerator(self._sound.backend))
        return ProcessSubject(backend, self._sound.communicator, ranks, DEADLINES)


def score(
    name: str, claim: str, tried: Subject, seeds: Sequence[int], cases: int, faults: Path
) -> Score:
    """Search once from every seed."""
    caught, clauses, began = 0, set(), time.monotonic()
    for seed in seeds:
        before = fault_bytes(faults)
        verdict = search(
            suite.find(claim), tried, SearchSettings(cases=cases, seed=seed, max_shrinks=0)
        )
        if isinstance(verdict, PropertyViolated):
            clauses.add(verdict.clause)
        caught += isinstance(verdict, PropertyViolated) or fault_bytes(faults) > before
    seconds = round(time.monotonic() - began, 1)
    return Score(name, len(seeds), caught, tuple(sorted(clauses)), seconds)


def fault_bytes(faults: Path) -> int:
    """How many bytes of faults there are."""
    return faults.stat().st_size if faults.exists() else 0


def line(score: Score) -> str:
    """One line of the table."""
    clauses = " ".join(score.clauses)
    return f"{score.name:55} {score.caught:3} of {score.runs:3}  {score.seconds:7.1f} s  {clauses}"


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="these only")
    parser.add_argument("--of", choices=sorted(KINDS), default="ascend", help="which backends")
    parser.add_argument("--runs", type=int, default=20, help="of each on one device (20)")
    parser.add_argument("--rank-runs", type=int, default=20, help="of each on several ranks (20)")
    parser.add_argument("--healthy", type=int, default=1, help="runs of the healthy backend (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores there too")
    return parser.parse_args(arguments)


def selected_breakages(trial: Trial, names: Sequence[str]) -> list[Breakage]:
    """Those of that name, all by default. Ends the program when there is none."""
    valid_names = [breakage.name for breakage in trial.breakages]
    if strange := sorted(set(names) - set(valid_names)):
        sys.exit(f"unknown: {', '.join(strange)}; known: {', '.join(valid_names)}")
    return [breakage for breakage in trial.breakages if not names or breakage.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when every broken backend was caught in every run, and no healthy one."""
    parsed = options(arguments)
    trial = Trial(parsed.of)
    tried = selected_breakages(trial, parsed.names)
    runs = {1: parsed.runs}
    caught = [show(trial.broken(b, runs.get(b.ranks, parsed.rank_runs))) for b in tried]
    used = sorted({(breakage.property, breakage.ranks) for breakage in tried})
    sound = [show(trial.healthy(*claim, parsed.healthy)) for claim in used if parsed.healthy]
    if parsed.json:
        judged = zip(tried, caught, strict=True)
        rows = {
            "broken": [
                {**asdict(row), "instead": b.broken, "property": b.property, "ranks": b.ranks}
                for b, row in judged
            ],
            "healthy": [asdict(row) for row in sound],
        }
        parsed.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row.caught < row.runs for row in caught) or any(row.caught for row in sound))


def show(row: Score) -> Score:
    """Print it at once: a run may take minutes."""
    print(line(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
