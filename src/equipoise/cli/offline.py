"""What commands share that only read and write files: reading, range checks, messages."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli.files import write_file
from equipoise.cli.option_checks import check_file
from equipoise.cli.process import print_stderr
from equipoise.hal.errors import (
    FileWriteFailed,
    FormatError,
    PlacementError,
    RankCountMissing,
    UsageError,
)
from equipoise.option import Argument

if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics, IterationRange

MAX_RANKS = 4096
MAX_SLOTS = 65_536
RECORD_FILE = "record.npz"
"""In the folder of `equipoise run --out`."""
STATISTICS = Argument("STATS", "recorded statistics: a file or a folder")


@contextmanager
def usage_errors(flag: str = "") -> Iterator[None]:
    """A file or numbers that cannot be taken are the user's to mend: a UsageError."""
    try:
        yield
    except FileWriteFailed:
        raise  # a full disk is no bad input
    except (FormatError, PlacementError) as error:
        if not flag and isinstance(error, FormatError) and (run := _run_folder(error.path)):
            raise UsageError(
                f"{error.path}: is of a run: `equipoise record --run {run} -o counts.npz` writes "
                "its counts"
            ) from error
        raise UsageError(f"{flag}: {error}" if flag else str(error)) from error


def _run_folder(path: str) -> Path | None:
    """The folder of a finished `equipoise run` where the path is it, or its record."""
    folder = Path(path).parent if Path(path).name == RECORD_FILE else Path(path)
    return folder if (folder / RECORD_FILE).is_file() else None


@contextmanager
def naming_ranks_option() -> Iterator[None]:
    """Name the option where a placement does not say for how many ranks it is."""
    try:
        yield
    except RankCountMissing as error:
        raise RankCountMissing(error.path, f"{error.what}, by --ranks") from error


def load_statistics(path: Path, during: "IterationRange | None" = None) -> "ExpertStatistics":
    """All of them, or only some iterations. Raises UsageError, also where nothing was counted."""
    from equipoise.balancer.formats import read_statistics

    with usage_errors():
        statistics = count_routed_experts(path) or read_statistics(path)
    warn_of_dropped_layers(path, statistics.empty_layers)
    if during is not None:
        with usage_errors(f"--range: {path}"):
            statistics = statistics.select_iterations(during)
    if not statistics.counts.any():
        where = path if during is None else f"{path}, iterations {during}"
        raise UsageError(f"{where}: all counts are 0: there is nothing to balance")
    return statistics


def count_routed_experts(path: Path) -> "ExpertStatistics | None":
    """Statistics of a folder with an array of routed experts for each request; None of all else.

    Windows are as `advise` makes them by default. Raises UsageError where nothing says how many
    experts there are, as of one array alone: those that no token was routed to would be missing in
    the placement.
    """
    from equipoise.balancer.formats import RoutingTrace, read_trace
    from equipoise.balancer.formats.files import is_folder, list_folder
    from equipoise.balancer.formats.format_names import VLLM_ROUTED
    from equipoise.balancer.formats.trace_reading import holds_expert_ids
    from equipoise.balancer.formats.trace_requests import array_names
    from equipoise.balancer.formats.trtllm_statistics import META_FILE

    with usage_errors():
        if path.suffix == ".npy" and holds_expert_ids(path):
            raise UsageError(
                f"{path}: is a routing trace (three axes of small integers): put it into a folder, "
                "with the number of experts in trace.json; or save counts as int32"
            )
        if not is_folder(path) or META_FILE in list_folder(path) or not array_names(path):
            return None
    from equipoise.cli.trace_options import DEFAULT_STEP_TOKENS
    from equipoise.report.replay.steps import Phase, TokenSteps
    from equipoise.report.replay.windows import windows_of

    with usage_errors():
        trace = read_trace(path, format=VLLM_ROUTED)
        assert isinstance(trace, RoutingTrace)
        if not trace.experts_known:
            raise UsageError(
                f"{path}: is a routing trace without the number of experts: write "
                '{"format": "equipoise-trace", "version": 1, "experts": NUMBER} to its trace.json'
            )
        windows = windows_of(TokenSteps(trace, 1, DEFAULT_STEP_TOKENS, Phase.PREFILL))
    return replace(windows.statistics, top_k=trace.top_k, source=trace.source)


def ranks_to_serve(ranks: int | None, path: Path, recorded: int | None) -> int:
    """The ranks of `--ranks`, else those that recorded the file.

    Raises UsageError where neither is known. One recorder says nothing: a run keeps the sum of its
    ranks, and is written as one.
    """
    if ranks is not None:
        return ranks
    if recorded is None:
        raise UsageError(f"--ranks is needed: {path} does not say how many ranks recorded it")
    if recorded == 1:
        raise UsageError(f"--ranks is needed: {path} has one rank's counts, or the sum of all")
    return recorded


def warn_of_dropped_layers(path: Path, empty_layers: Sequence[int]) -> None:
    """Warn of layers of the file that have no rows, which plans, files and replays are without."""
    if empty_layers:
        from equipoise.balancer.experts.placement import format_ranges

        layers = format_ranges(list(empty_layers))
        warn(f"{path}: no rows in layers {layers} (dense?): they are left out")


def drop_empty_layers(path: Path, statistics: "ExpertStatistics") -> "ExpertStatistics":
    """Only the layers that have rows, with a warning of those that do not."""
    kept = statistics.without_empty_layers()
    if kept is not statistics:
        warn_of_dropped_layers(path, kept.empty_layers)
    return kept


def load_placement(flag: str, path: Path, ranks: int | None) -> "ExpertPlacement":
    """Raises UsageError that names the flag."""
    from equipoise.balancer.formats import read_placement

    with usage_errors(flag), naming_ranks_option():
        return read_placement(path, ranks=ranks)


def check_outputs(inputs: Mapping[str, Path], outputs: Mapping[str, Path | None]) -> None:
    """Raises UsageError unless each output can be a file, and none is an input or another one."""
    uses = {os.path.realpath(path): f"{name} is read from" for name, path in inputs.items()}
    for flag, path in outputs.items():
        if path is None:
            continue
        check_file(flag, path)
        use = uses.setdefault(os.path.realpath(path), f"{flag} is written to")
        if not use.startswith(f"{flag} "):
            raise UsageError(f"{flag}: {path} is the file that {use}")


def write_figures(
    path: Path | None,
    figures: Mapping[str, object],
    out: Path | None = None,
    indent: int | None = 2,
) -> list[str]:
    """Writes them as JSON. Returns the line that names the file; none where there is no path."""
    if path is None:
        return []
    text = json.dumps(figures, indent=indent, allow_nan=False)
    return ["figures: " + write_file(path, f"{text}\n", out)]


def write_page(
    path: Path | None, render: Callable[[], str], name: str = "page", out: Path | None = None
) -> list[str]:
    """The same of a page with pictures; where they cannot be drawn, a warning says so."""
    if path is None:
        return []
    from equipoise.report.svg import PlotsMissing

    try:
        return [f"{name}: {write_file(path, render(), out)}"]
    except PlotsMissing as missing:
        warn(f"no {name}: {missing}")
        return []


def warn(what: str) -> None:
    """One line on standard error."""
    print_stderr(f"warning: {what}")


def print_written(progress: str, lines: Sequence[str]) -> None:
    """On standard error, where progress is shown."""
    if progress == "shown" and lines:
        print("\n".join(lines), file=sys.stderr)
