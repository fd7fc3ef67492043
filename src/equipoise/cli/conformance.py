"""`equipoise conformance`: checks the request, runs the suite, shows progress and results."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from equipoise import __version__, install_command
from equipoise.cli.conformance_options import HTML, JSON, ConformanceRequest
from equipoise.cli.files import probe_file, probe_folder, write_file
from equipoise.cli.option_checks import (
    check_backend,
    check_devices,
    check_file,
    check_folder,
)
from equipoise.hal import registry
from equipoise.hal.capabilities import Unavailable
from equipoise.hal.conformance.profile import RunTarget, families_of
from equipoise.hal.conformance.reproduce import FOLDER, remove_programs
from equipoise.hal.conformance.result import Finding, Status
from equipoise.hal.conformance.runner import PropertyRun
from equipoise.hal.errors import EquipoiseError, UsageError
from equipoise.input_files import read_input

CLEAR_LINE = "\r\033[K"
BAR_WIDTH = 24
BROKEN = (Status.VIOLATED, Status.EXPECTED)
"""Told at once."""


class ConformanceProgress(Protocol):
    """Progress of a conformance run; `close` ends its display."""

    def begin(self, total: int) -> None:
        """So many properties are to be played."""
        ...

    def next(self, run: PropertyRun) -> None:
        """This one starts."""
        ...

    def found(self, finding: Finding) -> None:
        """It has ended."""
        ...

    def done(self) -> None:
        """Nothing more comes."""
        ...


class ConformanceProgressBar:
    """One line that is drawn anew; violations are named at once, above it.

    Written here, and not taken from a package: the suite by itself requires none.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total, self._count, self._place = 0, 0, ""
        self._began = time.monotonic()

    def begin(self, total: int) -> None:
        """Draw it empty."""
        self._total = total
        self._draw()

    def next(self, run: PropertyRun) -> None:
        """Say which family plays where."""
        self._place = f"{run.claim.family} ({run.executor.value})"
        self._draw()

    def found(self, finding: Finding) -> None:
        """One further."""
        self._count += not finding.only_closing
        if finding.status in BROKEN:
            self._stream.write(f"{CLEAR_LINE}{finding.status.value}: {finding.property_name}\n")
        self._draw()

    def done(self) -> None:
        """Leave it standing."""
        if self._total:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self) -> None:
        filled = BAR_WIDTH * self._count // max(1, self._total)
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._stream.write(
            f"{CLEAR_LINE}{self._place:<22}|{'#' * filled:<{BAR_WIDTH}}| "
            f"{self._count}/{self._total} properties {minutes:02}:{seconds:02}"
        )
        self._stream.flush()


class ConformanceProgressLines:
    """A line when a family begins, and one for every violation; for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total, self._count, self._family = 0, 0, ""
        self._began = time.monotonic()

    def begin(self, total: int) -> None:
        """Remember how many."""
        self._total = total

    def next(self, run: PropertyRun) -> None:
        """Name a family that begins."""
        if run.claim.family != self._family:
            self._family = run.claim.family
            seconds = time.monotonic() - self._began
            self._say(f"{self._count}/{self._total} properties, {seconds:.0f} s; {self._family}")

    def found(self, finding: Finding) -> None:
        """Name a violation."""
        self._count += not finding.only_closing
        if finding.status in BROKEN:
            self._say(f"{finding.status.value}: {finding.property_name}")

    def done(self) -> None:
        """Nothing stays open."""

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class NoConformanceProgress:
    """Says nothing."""

    def begin(self, total: int) -> None:
        """Nothing."""

    def next(self, run: PropertyRun) -> None:
        """Nothing."""

    def found(self, finding: Finding) -> None:
        """Nothing."""

    def done(self) -> None:
        """Nothing."""


def conformance_progress_for(wish: str) -> ConformanceProgress:
    """What suits standard error; `hidden` is silent."""
    if wish == "hidden":
        return NoConformanceProgress()
    return (
        ConformanceProgressBar(sys.stderr)
        if sys.stderr.isatty()
        else ConformanceProgressLines(sys.stderr)
    )


if TYPE_CHECKING:
    from equipoise.hal.conformance.expected_violations import Expectation
    from equipoise.hal.conformance.result import SuiteResult


def conformance(request: ConformanceRequest, command: str) -> int:
    """Test a backend and print what was found; 0 when no clause is violated, else 1.

    Raises UsageError before anything starts, and what interrupted the run after printing what had
    been found by then.
    """
    validate(request)
    result = _conduct(request, read_xfail(request.xfail))
    if result is None:
        # Started by a launcher as a rank other than 0: rank 0 prints the results.
        return 0
    from equipoise.report.conformance import render
    from equipoise.report.terminal import stdout_colour_mode

    try:
        _write(request, result, command)
    finally:
        programs = None if request.out is None else request.out / FOLDER
        print(render(result, stdout_colour_mode(), programs), flush=True)
    if result.interruption is not None:
        raise result.interruption
    return result.exit_code


def validate(request: ConformanceRequest) -> None:
    """Raises UsageError naming the option, what it was and what it may be; creates nothing."""
    check_distributions()
    if importlib.util.find_spec("hypothesis") is None:
        raise UsageError(f"the suite draws with hypothesis: {install_command('conformance')}")
    check_backend("--backend", request.backend, registry.ACCELERATORS, registry.accelerator)
    _check_available("--backend", request.backend, registry.accelerator)
    if request.communicator is not None:
        name = request.communicator
        check_backend("--communicator", name, registry.COMMUNICATORS, registry.communicator)
        _check_available("--communicator", name, registry.communicator)
    if request.expert_parallel is not None:
        _check_expert_parallel(request, request.expert_parallel)
    if request.schedule_from is not None:
        _check_schedule_source(request.schedule_from, request.backend)
    else:
        _check_devices(request)
    if request.out is not None:
        check_folder("--out", request.out)
        probe_folder("--out", request.out)
    for flag, path in (("--json", request.json), ("--html", request.html)):
        if path is not None:
            check_file(_typed(flag, path, request), path)
            probe_file(_typed(flag, path, request), path)
    if request.json is not None and request.json == request.html:
        raise UsageError(f"--html: {request.html} is the file that --json is written to")


def check_distributions() -> None:
    """Raises UsageError where `equipoise` and `equipoise-conformance` are of two versions.

    Both have the same modules: those of the one that was installed last.
    """
    installed = {}
    for name in ("equipoise", "equipoise-conformance"):
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    if len(installed) > 1 and len(set(installed.values())) > 1:
        found = " and ".join(f"{name} {number}" for name, number in installed.items())
        raise UsageError(f"{found} are both installed: uninstall both, and install one")


def read_xfail(path: Path | None) -> "tuple[Expectation, ...]":
    """The violations that the file of --xfail lists. Raises UsageError, in one line."""
    from equipoise.hal.conformance.expected_violations import parse_expectations

    if path is None:
        return ()
    try:
        # Some editors begin a text with a mark of its encoding.
        return parse_expectations(read_input(path).decode("utf-8-sig"))
    except UsageError as error:
        raise UsageError(f"--xfail: {path}: {error}") from error
    except UnicodeDecodeError:
        raise UsageError(f"--xfail: {path} is not text") from None
    except OSError as error:
        raise UsageError(f"--xfail: {path} cannot be read: {error.strerror}") from None


def _remove_programs(folder: Path) -> None:
    """Those of an earlier run: beside the new ones they would say what is no longer so."""
    try:
        remove_programs(folder)
    except OSError as error:
        raise EquipoiseError(f"{error.filename} cannot be removed: {error.strerror}") from error


def _typed(flag: str, path: Path, request: ConformanceRequest) -> str:
    """The option that named the file: --out, where the file's own option was not used."""
    own = request.out is not None and path == request.out / {"--json": JSON, "--html": HTML}[flag]
    return f"--out's {path.name}" if own else flag


def _check_expert_parallel(request: ConformanceRequest, name: str) -> None:
    if request.only != families_of(RunTarget.LIBRARY) or request.schedule_from is not None:
        raise UsageError(
            "--expert-parallel judges a library on ranks: leave out --only and --schedule-from"
        )
    check_backend("--expert-parallel", name, registry.EXPERT_PARALLEL, registry.expert_parallel)
    _check_available("--expert-parallel", name, registry.expert_parallel)


def _check_available(flag: str, name: str, find: Callable[[str], Any]) -> None:
    try:
        probed = find(name).probe()
    except Exception:
        return  # a probe that raises breaks B1, which is for the suite to say
    if isinstance(probed, Unavailable):
        raise UsageError(f"{flag}: {name} cannot run here: {probed.reason}")


def _check_devices(request: ConformanceRequest) -> None:
    try:
        check_devices(request.backend, request.communicator, request.ranks)
    except UsageError:
        raise
    except Exception:
        return  # as above: the suite says it


def _check_schedule_source(name: str, backend: str) -> None:
    from equipoise.hal.conformance.executors.controlled import ControlledBackend
    from equipoise.hal.conformance.executors.steering import load_steer

    if isinstance(registry.accelerator(backend), ControlledBackend):
        raise UsageError(f"--schedule-from: every schedule of {backend} is chosen already")
    try:
        load_steer(name)
    except UsageError as error:
        raise UsageError(f"--schedule-from: {error}") from error


def _conduct(
    request: ConformanceRequest, expectations: "tuple[Expectation, ...]"
) -> "SuiteResult | None":
    from equipoise.cli.conformance import conformance_progress_for
    from equipoise.hal.conformance.runner import ConformanceRun

    communicator = request.communicator or registry.accelerator(request.backend).communicator
    campaign = ConformanceRun(
        backend=request.backend,
        communicator=communicator,
        ranks=request.ranks,
        profile=request.profile,
        families=request.only,
        levels=request.level,
        expectations=expectations,
        target=request.target,
        seed=request.seed,
        cases=request.cases,
        steer=request.schedule_from,
        library=request.expert_parallel,
    )
    watcher = conformance_progress_for(request.progress)
    try:
        return campaign.run(watcher)
    finally:
        watcher.done()


def _write(request: ConformanceRequest, result: "SuiteResult", command: str) -> None:
    from equipoise.machine import describe_machine
    from equipoise.report.conformance import (
        program_name,
        program_source,
        render_html,
        violations,
    )

    about = {
        "equipoise": __version__,
        "command": command,
        "machine": describe_machine(),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    lines = []
    if request.out is not None:
        folder = request.out / FOLDER
        _remove_programs(folder)
        for finding in violations(result):
            path = folder / program_name(finding)
            write_file(path, program_source(result, finding), folder)
    if request.json is not None:
        text = json.dumps(about | result.to_json(), indent=2, ensure_ascii=False)
        place = write_file(request.json, text + "\n", request.out)
        lines.append(f"verdicts: {place}")
    if request.html is not None:
        place = write_file(request.html, render_html(result, about), request.out)
        lines.append(f"page: {place}")
    if lines and request.progress == "shown":
        print("\n".join(lines), file=sys.stderr)
