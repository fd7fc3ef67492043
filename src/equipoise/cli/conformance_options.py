"""The options of `equipoise conformance`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from equipoise.cli.command import Command, Settings
from equipoise.cli.option_checks import MAX_RANKS
from equipoise.hal import registry
from equipoise.hal.conformance.clauses import COMMUNICATOR_FAMILIES, FAMILIES, Level
from equipoise.hal.conformance.profile import Profile, RunTarget, families_of
from equipoise.hal.conformance.reproduce import set_library_defaults
from equipoise.hal.errors import UsageError
from equipoise.hal.support.working_directory import search_working_directory
from equipoise.option import OUTPUT, Option, choice, several

DESCRIPTION = """\
Try to break a backend: properties of every clause of the contract, on programs
that are drawn, and shrunk when one fails. One line for each clause: held,
violated with the smallest program found, or unsupported by declaration."""
EXAMPLES = """\
examples:
  {command} --backend cpu --ranks 4
  {command} --backend virtual --only ordering locks
  {command} --backend my_package.backend:BACKEND --html report.html
  {command} --communicator my_package:COMMUNICATOR --level core --ranks 2
  mpiexec -n 4 {command} --backend cpu --communicator mpi

exit code: 0 every clause held, is declared unsupported, or is violated as --xfail
lists, 1 another is violated, or one that --xfail lists is held, or one could not be
judged, 2 bad input, 3 the suite could not run, 129, 130 and 143 interrupted: what was
found by then is printed and written"""

SUBJECT, EFFORT = "what is tested", "how hard"
JSON, HTML = "conformance.json", "conformance.html"
MAX_CASES = 1_000_000


VIRTUAL = "virtual"
"""The backend that plays all ranks in one thread."""


def host_backend() -> str:
    """The name of the host as an accelerator: native, or of the suite's own distribution."""
    return "cpu" if "cpu" in registry.names(registry.ACCELERATORS) else "host"


@dataclass(frozen=True, kw_only=True)
class ConformanceRequest(Settings):
    """What one `equipoise conformance` was asked for; `target` follows from it."""

    # fmt: off
    backend: Annotated[str, Option(
        "accelerator under test: a name that `equipoise doctor` lists, PACKAGE:OBJECT, or "
        "accelerator:NAME for what torch drives by that name", SUBJECT,
        default="cpu (host without native code); with --communicator it is not judged")] = "cpu"
    communicator: Annotated[str | None, Option(
        "communicator under test, by name or as PACKAGE:OBJECT", SUBJECT,
        default="the one that goes with the backend")] = None
    expert_parallel: Annotated[str | None, Option(
        "judge this expert-parallel library, by name or as PACKAGE:OBJECT, and nothing of the "
        "backend and the communicator that it runs on", SUBJECT)] = None
    ranks: Annotated[int, Option(
        "most processes to test the communicator on; smaller groups are tested too; virtual plays "
        "up to 8 ranks in one thread", SUBJECT,
        least=1, most=MAX_RANKS)] = 4
    schedule_from: Annotated[str | None, Option(
        "a callable that is given the schedule bytes of each case before it is played, for a "
        "device whose schedule can be chosen; plays on one device in this process only", SUBJECT,
        metavar="PACKAGE:OBJECT", rare=True)] = None
    profile: Annotated[Profile, Option("minutes, or hours", EFFORT)] = Profile.CI
    only: Annotated[tuple[str, ...], Option(
        f"only these properties: {', '.join(FAMILIES)}", EFFORT,
        kind=replace(several(choice(FAMILIES), f"a family ({', '.join(FAMILIES)})"),
                     metavar="FAMILY"),
        default="all families")] = FAMILIES
    level: Annotated[tuple[Level, ...], Option(
        f"only what these levels need: {', '.join(Level)}", EFFORT,
        kind=replace(several(choice(Level), f"a level ({', '.join(Level)})"), metavar="LEVEL"),
        default="all levels")] = tuple(Level)
    seed: Annotated[int, Option(
        "what the draws start from: the same seed draws the same programs", EFFORT, least=0)] = 0
    cases: Annotated[int | None, Option(
        "how many cases of each property to play", EFFORT, least=1, most=MAX_CASES,
        default="as the profile says")] = None
    xfail: Annotated[Path | None, Option(
        "violations that are known, as TOML: they do not fail the run, their absence does", EFFORT
    )] = None
    out: Annotated[Path | None, Option(
        f"folder for {JSON}, {HTML}, and each violation as a Python file", OUTPUT, metavar="DIR"
    )] = None
    json: Annotated[Path | None, Option("write every verdict there", OUTPUT)] = None
    html: Annotated[Path | None, Option("write a page with every verdict there", OUTPUT)] = None
    # fmt: on
    target: RunTarget = RunTarget.BACKEND


def resolve_conformance_request(
    command_line: Mapping[str, Any], file: Mapping[str, Any]
) -> ConformanceRequest:
    """Command line over configuration file over default.

    A communicator is judged by itself where no accelerator is named: then the host's is only what
    it is judged on, and the control plane and signatures are those of whoever wrote its adapter.
    An expert-parallel library is judged by its own family alone.
    """
    values: dict[str, Any] = {**file, **command_line}
    if "expert_parallel" in values:
        values = {"only": families_of(RunTarget.LIBRARY)} | values | {"target": RunTarget.LIBRARY}
    elif "communicator" in values and not values.keys() & {"backend", "schedule_from"}:
        values = {"only": COMMUNICATOR_FAMILIES} | values | {"target": RunTarget.COMMUNICATOR}
    out = values.get("out")
    if out is not None:
        values = {"json": out / JSON, "html": out / HTML} | values
    values.setdefault("backend", host_backend())
    if "ranks" in values and values["backend"] == VIRTUAL:
        raise UsageError(f"--ranks has no meaning on {VIRTUAL}: one thread plays up to 8 ranks")
    return ConformanceRequest(**values)


def _run(request: ConformanceRequest, command: str) -> int:
    set_library_defaults()
    search_working_directory()
    # Here, not above: torch takes a second that `--help` need not wait for.
    from equipoise.cli.conformance import conformance

    return conformance(request, command)


def command_of(program: str) -> Command:
    """The command, with examples of a program that has it."""
    return Command(
        ConformanceRequest,
        _run,
        description=DESCRIPTION,
        examples=EXAMPLES.format(command=program),
        request_of=resolve_conformance_request,
    )


COMMAND = command_of("equipoise conformance")
