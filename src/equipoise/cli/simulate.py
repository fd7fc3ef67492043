"""`equipoise simulate`."""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from equipoise.cli.files import write_file
from equipoise.cli.offline import options_of, tell_written, warn
from equipoise.cli.simulate_options import BY_KEY, SimulateRequest
from equipoise.hal.errors import EquipoiseError, PolicyError, UsageError

if TYPE_CHECKING:
    from equipoise.balancer.requests.comparison import Contender, Kept, Result
    from equipoise.balancer.requests.outcome import Outcome
    from equipoise.balancer.requests.workload import Workload
    from equipoise.cli.simulate_progress import Progress
    from equipoise.cli.simulate_setup import Staged
    from equipoise.report.simulation.simulated import Simulated, Sweep

LOADS = 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2
WORKERS = 4.0, 8.0, 16.0, 32.0


def simulate(arguments: Namespace, command: str) -> int:
    """Run every policy on every seed, write figures and report, print the table; returns 0.

    Raises UsageError before anything is written, EquipoiseError where no request was served.
    """
    from equipoise.cli.simulate_validation import validate
    from equipoise.report.ink import ink_of_stdout
    from equipoise.report.simulation.table import render

    request = request_of(vars(arguments))
    validate(request)
    with _refused():
        found = simulated(request)
    try:
        # Before the table: an output that nobody reads must not cost the files.
        _write(request, found, command)
    finally:
        print(render(found, ink_of_stdout()), flush=True)
    _check_served(request, found)
    return 0


def _check_served(request: SimulateRequest, found: "Simulated") -> None:
    """Raises EquipoiseError where every request failed: a table of dashes says nothing."""
    points = () if found.sweep is None else found.sweep.points
    results = [*found.results, *(result for point in points for result in point.results)]
    if any(result.interval("failed").mean < 1 for result in results):
        return
    bounds = {"--kv-tokens": request.kv_tokens, "--patience": request.patience}
    why = " and ".join(f"{flag} {value:g}" for flag, value in bounds.items() if value is not None)
    why = why or "these settings"
    raise EquipoiseError(f"every request failed, with every policy: {why} let none be served")


def request_of(given: Mapping[str, Any]) -> SimulateRequest:
    """What the command line asks for, its configuration file included."""
    return SimulateRequest(**options_of(given, BY_KEY))


def simulated(request: SimulateRequest) -> "Simulated":
    """Run everything. Raises UsageError, and PolicyError for settings that no policy takes."""
    from equipoise.cli.simulate_progress import progress_for
    from equipoise.cli.simulate_setup import load_trace, stage
    from equipoise.report.simulation.seen import Watch
    from equipoise.report.simulation.simulated import Simulated, Subject

    trace, watch = load_trace(request), Watch()
    staged = stage(request, trace)
    subject = Subject.of(staged.trial, staged.sampling, staged.arrivals)
    _warn_of_seeds(request, staged)
    points = points_of(request)
    runs = len(staged.entered) * request.seeds * (1 + len(points))
    progress = progress_for(request.progress, runs)
    try:
        results = _compared(staged, progress, watch.keep)
        sweep = _swept(request, points, trace, progress)
    finally:
        progress.close()
    seeds = tuple(staged.trial.seeds)
    return Simulated(subject=subject, seeds=seeds, results=results, seen=watch.seen(), sweep=sweep)


def points_of(request: SimulateRequest) -> tuple[float, ...]:
    """Of the sweep; none without one."""
    if request.sweep is None:
        return ()
    return request.points or (LOADS if request.sweep == "load" else WORKERS)


def _swept(
    request: SimulateRequest,
    points: tuple[float, ...],
    trace: "Workload | None",
    progress: "Progress",
) -> "Sweep | None":
    from equipoise.cli.simulate_setup import stage
    from equipoise.report.simulation.simulated import Point, Sweep

    if request.sweep is None:
        return None
    found = []
    for value in points:
        there = (
            replace(request, load=value)
            if request.sweep == "load"
            else replace(request, workers=int(value))
        )
        found.append(Point(value, _compared(stage(there, trace), progress)))
    return Sweep(request.sweep, tuple(found))


def _compared(
    staged: "Staged", progress: "Progress", kept: "Kept | None" = None
) -> "tuple[Result, ...]":
    from equipoise.balancer.requests.comparison import compare

    count = staged.trial.draw(staged.trial.seeds[0]).count

    def told(label: str, seed: int, done: int) -> None:
        progress.at(label, seed, done / count)

    def ended(contender: "Contender", seed: int, outcome: "Outcome") -> None:
        if kept is not None:
            kept(contender, seed, outcome)
        progress.ended()

    return compare(staged.trial, staged.entered, told, ended)


@contextmanager
def _refused() -> Iterator[None]:
    """Settings that no policy takes are the user's to mend."""
    try:
        yield
    except PolicyError as error:
        raise UsageError(str(error)) from error


def _warn_of_seeds(request: SimulateRequest, staged: "Staged") -> None:
    drawn = staged.trial.load is not None and not staged.trial.own_times
    if request.sampling == "recorded" and request.seeds > 1 and not drawn:
        warn("--sampling recorded: seeds differ in nothing but what policies and noise draw")


def _write(request: SimulateRequest, found: "Simulated", command: str) -> None:
    from equipoise.report.simulation.record import plain, to_json

    about = {"command": command, "settings": plain(asdict(request))}
    figures = about | to_json(found)
    text = json.dumps(figures, indent=2, allow_nan=False)
    place = write_file(request.figures_file, text + "\n", request.out)
    written = [f"figures: {place}"]
    from equipoise.report.canvas import PlotsMissing
    from equipoise.report.simulation.html import render_html

    try:
        place = write_file(request.report_file, render_html(found, about, figures), request.out)
        written.append(f"report: {place}")
    except PlotsMissing as missing:
        warn(f"no report: {missing}")
    tell_written(request.progress, written)
