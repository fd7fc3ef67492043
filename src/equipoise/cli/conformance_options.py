"""The options of `equipoise conformance`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.cli import option_kinds as kinds
from equipoise.cli.option import Option
from equipoise.hal import registry
from equipoise.hal.conformance.clauses import COMMUNICATOR_FAMILIES, FAMILIES, Level
from equipoise.hal.conformance.profile import Profile, RunTarget, families_of

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

exit code: 0 every clause held or is declared unsupported, 1 one is violated, or one
that --xfail lists is held, or one could not be judged, 2 bad input, 3 the suite could
not run, 130 interrupted: what was found by then is printed and written"""

SUBJECT, EFFORT, OUTPUT = "what is tested", "how hard", "output"
JSON, HTML = "conformance.json", "conformance.html"

OPTIONS = (
    Option(key="backend", kind=kinds.NAME, group=SUBJECT, metavar="NAME",
           shown_default="cpu (host without native code); with --communicator it is not judged",
           help="accelerator under test: a name that `equipoise doctor` lists, PACKAGE:OBJECT, or "
           "accelerator:NAME for what torch drives by that name"),
    Option(key="communicator", kind=kinds.NAME, group=SUBJECT, metavar="NAME",
           shown_default="the one that goes with the backend",
           help="communicator under test, by name or as PACKAGE:OBJECT"),
    Option(key="expert_parallel", kind=kinds.NAME, group=SUBJECT, metavar="NAME",
           shown_default="none",
           help="judge this expert-parallel library, by name or as PACKAGE:OBJECT, and nothing of "
           "the backend and the communicator that it runs on"),
    Option(key="ranks", kind=kinds.WHOLE, group=SUBJECT, metavar="N", shown_default="4",
           help="most processes to test the communicator on; smaller groups are tested too"),
    Option(key="schedule_from", kind=kinds.NAME, group=SUBJECT, metavar="PACKAGE:OBJECT",
           shown_default="none",
           help="a callable that is given the schedule bytes of each case before it is played, for "
           "a device whose schedule can be chosen; plays on one device in this process only"),
    Option(key="profile", kind=kinds.PROFILE, group=EFFORT, metavar="ci|deep", shown_default="ci",
           help="minutes, or hours"),
    Option(key="only", kind=kinds.FAMILY_NAMES, group=EFFORT, metavar="FAMILY",
           shown_default="all families", help=f"only these properties: {', '.join(FAMILIES)}"),
    Option(key="level", kind=kinds.LEVEL_NAMES, group=EFFORT, metavar="LEVEL",
           shown_default="all levels", help=f"only what these levels need: {', '.join(Level)}"),
    Option(key="seed", kind=kinds.WHOLE, group=EFFORT, metavar="N", shown_default="0",
           help="what the draws start from: the same seed draws the same programs"),
    Option(key="cases", kind=kinds.WHOLE, group=EFFORT, metavar="N",
           shown_default="as the profile says", help="how many cases of each property to play"),
    Option(key="xfail", kind=kinds.PATH, group=EFFORT, metavar="FILE", shown_default="none",
           help="violations that are known, as TOML: they do not fail the run, their absence does"),
    Option(key="out", kind=kinds.PATH, group=OUTPUT, metavar="DIR", shown_default="none",
           help=f"folder for {JSON}, {HTML}, and each violation as a Python file"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write every verdict there"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write a page with every verdict there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no progress, only the clauses and the matrix"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


def host_backend() -> str:
    """The name of the host as an accelerator: native, or of the suite's own distribution."""
    return "cpu" if "cpu" in registry.names(registry.ACCELERATORS) else "host"


@dataclass(frozen=True, kw_only=True)
class ConformanceRequest:
    """What one `equipoise conformance` was asked for; `progress` is `shown` or `hidden`."""

    backend: str = "cpu"
    communicator: str | None = None
    expert_parallel: str | None = None
    ranks: int = 4
    schedule_from: str | None = None
    profile: Profile = Profile.CI
    only: tuple[str, ...] = FAMILIES
    level: tuple[Level, ...] = tuple(Level)
    xfail: Path | None = None
    seed: int = 0
    cases: int | None = None
    json: Path | None = None
    html: Path | None = None
    out: Path | None = None
    progress: str = "shown"
    target: RunTarget = RunTarget.BACKEND


def resolve_conformance_request(
    command_line: Mapping[str, Any], file: Mapping[str, Any]
) -> ConformanceRequest:
    """Command line over configuration file over default.

    A communicator is judged by itself where no accelerator is named: then the host's is only what
    it is judged on, and the control plane and signatures are those of whoever wrote its adapter.
    An expert-parallel library is judged by its own family alone.
    """
    values = dict(file) | dict(command_line)
    if "expert_parallel" in values:
        values = {"only": families_of(RunTarget.LIBRARY)} | values | {"target": RunTarget.LIBRARY}
    elif "communicator" in values and not values.keys() & {"backend", "schedule_from"}:
        values = {"only": COMMUNICATOR_FAMILIES} | values | {"target": RunTarget.COMMUNICATOR}
    out = values.get("out")
    if out is not None:
        values = {"json": out / JSON, "html": out / HTML} | values
    values.setdefault("backend", host_backend())
    values["progress"] = "hidden" if values.pop("quiet", False) else "shown"
    return ConformanceRequest(**values)
