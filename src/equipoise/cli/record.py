"""`equipoise record`: its options, its checks, and the recording of expert loads on all ranks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from equipoise.balancer.formats.format_names import (
    FOLDER_FORMAT_NAME,
    ROUTED_FORMAT_NAMES,
    SGLANG_ROUTED,
    STATISTICS_FORMAT_NAMES,
    VLLM_ROUTED,
)
from equipoise.balancer.formats.iterations import IterationRange
from equipoise.cli import kinds
from equipoise.cli.command import Command, Settings
from equipoise.cli.files import (
    LAUNCHER_VARIABLE,
    describe_path,
    ensure_folder,
    probe_file,
    probe_folder,
)
from equipoise.cli.offline import RECORD_FILE, check_outputs, print_written, usage_errors, warn
from equipoise.cli.option_checks import check_folder
from equipoise.cli.progress import run_progress_for
from equipoise.cli.run_options import (
    REDUNDANT_EXPERTS,
    merge_sources,
    run_settings,
)
from equipoise.cli.validation import (
    INEFFECTIVE_UNBALANCED,
    refuse_ineffective,
    validate_settings,
)
from equipoise.demo.settings import Balance, RunSettings
from equipoise.demo.temporary_folder import temporary_folder
from equipoise.hal.errors import UsageError
from equipoise.option import OUTPUT, Option, options_of

SUBJECT = "what is recorded"
RECORD = """\
Serve real text as `run` does, once, and write how many rows every expert of every
layer took at every step, in a folder with a file for each rank (page Formats). Or
take what a finished run has counted, by --run."""
EXAMPLES = """\
examples:
  equipoise record -o recorded/                      # 120 steps on four ranks
  equipoise record --range 40-80 -o recorded/        # of these, steps 40 to 79
  equipoise record --balance on -o recorded/         # while experts move
  equipoise record --run equipoise-run -o counts.npz   # what a run has counted

exit code: 0 recorded, 2 bad input, nothing was started or written, 3 it failed or
could not be written"""
RUN_KEYS = (
    *("ranks", "backend", "communicator", "deadline", "steps", "text", "seed"),
    *("balance", "slots", "shares", "window_size", "step_interval"),
)
"""Options of serving that a recording has too."""


@dataclass(frozen=True, kw_only=True)
class RecordRequest(Settings):
    """What one `equipoise record` was asked for, besides the settings of serving.

    `explicit_options` are the keys that got a value on the command line or in a file.
    """

    settings: RunSettings
    # fmt: off
    range: Annotated[IterationRange | None, Option(
        "only these steps; STOP itself is not one of them", SUBJECT, kind=kinds.RANGE,
        default="every step")] = None
    run: Annotated[Path | None, Option(
        "what `equipoise run` has left there (its --out), instead of serving: the sum of all ranks",
        SUBJECT, metavar="DIR")] = None
    out: Annotated[Path, Option(
        "write the recording there: a new or empty folder, or a file", OUTPUT,
        short="-o", metavar="DIR|FILE", why_required="where to write the statistics")]
    format: Annotated[str | None, Option(
        f"format of the statistics: {', '.join(STATISTICS_FORMAT_NAMES)}; or the experts of every "
        f"token, by request: {', '.join(ROUTED_FORMAT_NAMES)}", OUTPUT,
        default=f"as the suffix says, a folder is {FOLDER_FORMAT_NAME}")] = None
    # fmt: on
    explicit_options: frozenset[str] = frozenset()


OWN: Mapping[str, Option] = options_of(RecordRequest)
SERVING = options_of(RunSettings, RUN_KEYS)
BY_KEY: Mapping[str, Option] = {
    **OWN,
    **SERVING,
    "balance": replace(SERVING["balance"], value=Balance.OFF),
    REDUNDANT_EXPERTS.key: REDUNDANT_EXPERTS,
}


def resolve_record_request(
    command_line: Mapping[str, Any], file: Mapping[str, Any]
) -> RecordRequest:
    """Command line over configuration file over default. Raises UsageError."""
    values = merge_sources(command_line, file)
    own = {key: value for key, value in values.items() if key in OWN}
    run_values = {key: value for key, value in values.items() if key not in OWN}
    return RecordRequest(
        settings=run_settings({"balance": Balance.OFF} | run_values),
        explicit_options=frozenset(values),
        **own,
    )


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertStatistics


def record(request: RecordRequest, command: str) -> int:
    """Serve and count, or take what was counted; write it and say what it is; returns 0.

    Raises UsageError before anything starts, EquipoiseError where serving or writing fails.
    """
    validate(request)
    if request.run is not None:
        _take_from_record(request)
    elif LAUNCHER_VARIABLE in os.environ:
        _serve_one_rank(request)
    else:
        _serve(request)
    return 0


def validate(request: RecordRequest) -> None:
    """Raises UsageError naming the option; creates nothing."""
    if request.run is not None:
        _check_out(request)
        _check_needless(request)
        return
    if request.settings.balance is Balance.OFF:
        refuse_ineffective(request.explicit_options, INEFFECTIVE_UNBALANCED, "without --balance on")
    validate_settings(request.settings)
    steps = request.settings.steps
    if request.range is not None and request.range.stop > steps:
        raise UsageError(f"--range {request.range} goes beyond the {steps} steps of --steps")
    _check_out(request)  # after the settings, which say whether a launcher has started the ranks


def _check_out(request: RecordRequest) -> None:
    from equipoise.balancer.formats import statistics_format

    if _routed_format(request) is not None:
        _check_routed_out(request)
        return
    names = *STATISTICS_FORMAT_NAMES, *ROUTED_FORMAT_NAMES
    if request.format is not None and request.format not in names:
        raise UsageError(f"--format must be one of {', '.join(names)}, got {request.format}")
    with usage_errors("-o"):
        form = statistics_format(request.out, request.format)
    if form.name == FOLDER_FORMAT_NAME:
        _check_new(request.out)
        probe_folder("-o", request.out)
        return
    if request.run is None and LAUNCHER_VARIABLE in os.environ:
        raise UsageError(f"-o: {request.out} is no folder: each rank of a launcher writes a file")
    inputs = {} if request.run is None else {"--run": _record_of(request.run)}
    check_outputs(inputs, {"-o": request.out})
    probe_file("-o", request.out)


def _routed_format(request: RecordRequest) -> str | None:
    """The format where the experts of every token are asked for; None where counts are."""
    if request.format is None:
        return SGLANG_ROUTED if request.out.suffix.lower() == ".jsonl" else None
    return request.format if request.format in ROUTED_FORMAT_NAMES else None


def _check_routed_out(request: RecordRequest) -> None:
    form = _routed_format(request)
    if request.run is not None:
        raise UsageError(f"--run has counts, and {form} the experts of every token: serve instead")
    if LAUNCHER_VARIABLE in os.environ:
        raise UsageError(f"{form} is not written under a launcher: start the ranks by --ranks")
    if form == VLLM_ROUTED:
        _check_new(request.out)
        probe_folder("-o", request.out)
    else:
        if request.out.suffix.lower() != ".jsonl":
            raise UsageError(f"-o: {request.out} needs the suffix .jsonl for {form}")
        check_outputs({}, {"-o": request.out})
        probe_file("-o", request.out)


def _check_new(folder: Path) -> None:
    check_folder("-o", folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"-o: {folder} is not empty: a recording needs a folder of its own")


def _check_needless(request: RecordRequest) -> None:
    for key in sorted(request.explicit_options.difference(OWN)):
        raise UsageError(f"{BY_KEY[key].name} has no meaning with --run: nothing is served")


def _record_of(run: Path) -> Path:
    return run / RECORD_FILE if run.is_dir() else run


def _take_from_record(request: RecordRequest) -> None:
    """Of a finished run: its record has the rows of all ranks in one sum."""
    from equipoise.balancer.formats import ExpertStatistics
    from equipoise.demo.run_record import load_record

    assert request.run is not None
    path = _record_of(request.run)
    run_record = load_record(path)
    with usage_errors(f"--run: {path}"):
        statistics = ExpertStatistics(
            run_record.expert_rows, first_iteration=0, top_k=run_record.top_k
        )
    if request.range is not None:
        with usage_errors(f"--range: {path}"):
            statistics = statistics.select_iterations(request.range)
    _write(request, statistics, run_record.ranks)
    print(f"a run keeps the sum of its ranks: `report` and `plan` need --ranks {run_record.ranks}")


def _serve(request: RecordRequest) -> None:
    """Every rank writes its file under a temporary name; whole files are then moved into place."""
    from equipoise.balancer.formats import read_statistics

    with temporary_folder() as folder:
        _run(request, folder)
        if (form := _routed_format(request)) is not None:
            _write_tokens(request, folder, form)
            return
        statistics = read_statistics(folder)
        _write(request, statistics, request.settings.ranks)


def _serve_one_rank(request: RecordRequest) -> None:
    """One rank of a launcher, which may have others on other machines: it writes its own file."""
    _run(request, request.out)
    if os.environ.get("RANK") == "0":
        print(_closing(_steps(request), request.settings.ranks))
        print_written(request.progress, [f"statistics: {request.out}"])


def _run(request: RecordRequest, folder: Path) -> None:
    from equipoise.demo.launcher import record_demo
    from equipoise.demo.settings import RecordedContent, RecordingSettings

    tokens = _routed_format(request) is not None
    content = RecordedContent.TOKENS if tokens else RecordedContent.COUNTS
    recording = RecordingSettings(folder, _steps(request), content)
    progress = run_progress_for(request.progress)
    try:
        record_demo(request.settings, recording, progress)
    finally:
        progress.done()


def _steps(request: RecordRequest) -> IterationRange:
    return request.range or IterationRange(0, request.settings.steps)


def _write(request: RecordRequest, statistics: "ExpertStatistics", ranks: int) -> None:
    from equipoise.balancer.formats import write_statistics

    place = describe_path(request.out)
    ensure_folder(request.out.parent)
    loss = write_statistics(request.out, statistics, request.format)
    if loss:
        warn(f"{request.out}: {loss}")
    rows = f"{int(statistics.counts.sum()):,} rows"
    layers, experts = len(statistics.layers), statistics.experts
    print(
        f"{_closing(statistics.iteration_range, ranks)}: "
        f"{rows} of {layers} layers of {experts} experts"
    )
    print_written(request.progress, [f"statistics: {place}"])


def _write_tokens(request: RecordRequest, folder: Path, form: str) -> None:
    from equipoise.balancer.formats import write_trace
    from equipoise.demo.routing_recorder import read_ranks
    from equipoise.demo.settings import EXPERTS

    place = describe_path(request.out)
    trace = read_ranks(folder, request.settings.ranks, EXPERTS)
    ensure_folder(request.out.parent)
    write_trace(request.out, trace, form)
    requests = f"{trace.tokens:,} tokens of {trace.part_count:,} requests"
    print(
        f"{_closing(_steps(request), request.settings.ranks)}: "
        f"{requests}, {len(trace.layers)} layers of {trace.experts} experts"
    )
    print_written(request.progress, [f"routing trace: {place}"])


def _closing(steps: IterationRange, ranks: int) -> str:
    """The line that a recording ends with."""
    on = f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
    return f"recorded steps {steps.start} to {steps.stop - 1} on {on}"


COMMAND = Command(
    RecordRequest,
    record,
    description=RECORD,
    examples=EXAMPLES,
    options=lambda: BY_KEY,
    request_of=resolve_record_request,
)
