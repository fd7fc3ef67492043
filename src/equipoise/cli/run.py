"""`equipoise run`: checks what was asked for, starts the ranks, writes report and figures."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from equipoise.cli.files import describe_path, ensure_folder, write_file
from equipoise.cli.offline import RECORD_FILE, naming_ranks_option, usage_errors
from equipoise.cli.process import print_stderr
from equipoise.cli.progress import run_progress_for
from equipoise.cli.run_options import (
    BY_KEY,
    RunRequest,
)
from equipoise.cli.validation import refuse_ineffective, validate
from equipoise.demo.progress import RunProgress
from equipoise.demo.run_record import RunRecord, save_record
from equipoise.demo.settings import (
    EXPERTS,
    LAYERS,
    MOVES,
    PLANS,
    Balance,
    RunSettings,
    served_variants,
)
from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.report.run.chrome_trace import render_trace
from equipoise.report.run.html import PlotsMissing, render_html
from equipoise.report.run.summary import REBALANCES_PER_PHASE, RunSummary, summarise
from equipoise.report.run.table import render
from equipoise.report.terminal import stdout_colour_mode

INEFFECTIVE_WITH_PLACEMENT = {
    "shares": "the placement has shares of its own",
    "locality": "its shares divide no batch's own counts",
    **dict.fromkeys(("window_size", "step_interval"), "nothing is planned anew"),
    "log_rebalances": "there is no rebalance",
    **{
        option.key: "nothing is planned anew" for option in BY_KEY.values() if option.group == PLANS
    },
    **{option.key: "no weight moves" for option in BY_KEY.values() if option.group == MOVES},
}
"""Options that have no effect with --placement, which is served unchanged, and why."""


def with_placement(request: RunRequest) -> RunRequest:
    """The request with the slots of its placement, if it has one.

    Raises UsageError where the file is not for this model and these ranks, or something else that
    was asked for cannot be with it.
    """
    path, settings = request.settings.placement, request.settings
    if path is None:
        return request
    refuse_ineffective(request.explicit_options, INEFFECTIVE_WITH_PLACEMENT, "with --placement")
    # Here, not above: numpy takes a moment that other runs need not wait for.
    from equipoise.demo.placement_file import read_matching

    with usage_errors("--placement"), naming_ranks_option():
        placement = read_matching(path, settings.stage_ranks, LAYERS, EXPERTS)
    if "slots" in request.explicit_options and settings.slots != placement.slots:
        raise UsageError(
            f"--placement: has {placement.slots} slots, and --slots is {settings.slots}"
        )
    return replace(request, settings=replace(settings, slots=placement.slots))


def run(request: RunRequest, command: str) -> int:
    """Serve, write the figures and the report, print the table; returns the exit code.

    Raises UsageError before anything starts, EquipoiseError where the run fails.
    """
    request = with_placement(request)
    validate(request)
    record = _serve(request)
    if record is None:
        # Started by a launcher as a rank other than 0: rank 0 prints and writes everything.
        return 0
    summary = summarise(record)
    try:
        # Before the table: a closed standard output must not cost a finished run its files.
        _write(request, record, summary, command)
    finally:
        print(render(summary, stdout_colour_mode()), flush=True)
    return summary.exit_code


def too_few_steps(settings: RunSettings) -> str:
    """Why the run will end with "not exercised", said before it serves; nothing where it need not.

    A rebalance opens behind every interval, and the last one of a phase ends in the next.
    """
    from equipoise.demo.traffic import load_phases

    if settings.balance is Balance.OFF or settings.placement or settings.stage_ranks == 1:
        return ""
    phases = len(load_phases(settings.text))
    least = phases * (REBALANCES_PER_PHASE + 1) * settings.step_interval
    if settings.steps >= least:
        return ""
    return (
        f"{settings.steps} steps may be too few for {REBALANCES_PER_PHASE} rebalances in each of "
        f"{phases} phase(s), one every {settings.step_interval} steps: outputs are compared, and "
        f'the run may end with "not exercised"; --steps {least} are enough'
    )


def _serve(request: RunRequest) -> RunRecord | None:
    from equipoise.cli.memory_report import render_memory_report
    from equipoise.demo.launcher import run_demo, with_communicator

    with_communicator(request.settings)  # a backend that cannot run says so, and nothing else does
    if request.progress == "shown" and os.environ.get("RANK", "0") == "0":
        print(render_memory_report(request.settings), file=sys.stderr, flush=True)
        if line := too_few_steps(request.settings):
            print_stderr(f"warning: {line}")
    with _shown_progress(request) as progress:
        return run_demo(request.settings, progress)


@contextmanager
def _shown_progress(request: RunRequest) -> Iterator[RunProgress]:
    """Shows how far the run is; whatever ends it, what was drawn is left in order."""
    if request.settings.live and os.environ.get("RANK", "0") == "0":
        from equipoise.cli.live import LiveSession, live_setup

        setup = live_setup(request.settings, LAYERS, EXPERTS)
        with LiveSession(setup, sys.stdout) as display:
            yield display
        return
    passes = len(served_variants(request.settings)) + 1  # and the reference process
    wish = "hidden" if request.settings.live else request.progress
    progress = run_progress_for(wish, passes)
    try:
        yield progress
    finally:
        progress.done()


def _write(request: RunRequest, record: RunRecord, summary: RunSummary, command: str) -> None:
    """Every output, whatever becomes of the others; raises EquipoiseError naming all that failed.

    The trace comes last: it is the largest, and what a full disk may cost first.
    """
    output_lines: list[str] = []
    failed: list[str] = []
    for lines, write in _outputs(request, record, summary, command):
        try:
            write()
            output_lines += lines
        except PlotsMissing as missing:
            print(f"equipoise: no report: {missing}", file=sys.stderr)
        except EquipoiseError as error:
            failed.append(str(error))
    if output_lines and request.progress == "shown":
        print("\n".join(output_lines), file=sys.stderr)
    if failed:
        raise EquipoiseError("; ".join(failed))


def _outputs(
    request: RunRequest, record: RunRecord, summary: RunSummary, command: str
) -> Iterator[tuple[list[str], Callable[[], object]]]:
    """Output files in order: the lines that name each, and the function that writes it."""
    yield (
        [f"figures: {describe_path(request.json, request.settings.out)}"],
        lambda: write_file(request.json, _figures(summary)),
    )
    # Everything measured, for pictures and questions that come later.
    yield [], lambda: _save(record, ensure_folder(request.settings.out) / RECORD_FILE)
    report = [f"report: {describe_path(request.html, request.settings.out)}"]
    yield report, lambda: write_file(request.html, render_html(record, summary, command))
    if (trace := request.trace) is not None:
        place = describe_path(trace, request.settings.out)
        line = f"trace: {place} (ui.perfetto.dev or chrome://tracing opens it)"
        yield [line], lambda: write_file(trace, render_trace(record))


def _figures(summary: RunSummary) -> str:
    return json.dumps(summary.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _save(record: RunRecord, path: Path) -> None:
    try:
        save_record(record, path)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be written: {error.strerror}") from error
