"""The options of `equipoise conformance`: each is a flag and a key of the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.cli import kinds
from equipoise.cli.option import Option
from equipoise.hal.conformance.clauses import FAMILIES
from equipoise.hal.conformance.profile import Profile

SUBJECT, EFFORT, OUTPUT = "what is tested", "how hard", "output"
JSON, HTML = "conformance.json", "conformance.html"

OPTIONS = (
    Option(key="backend", kind=kinds.NAME, group=SUBJECT, metavar="NAME", shown_default="cpu",
           help="accelerator under test: a name that `equipoise doctor` lists, or PACKAGE:OBJECT"),
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
    Option(key="seed", kind=kinds.WHOLE, group=EFFORT, metavar="N", shown_default="0",
           help="what the draws start from: the same seed draws the same programs"),
    Option(key="cases", kind=kinds.WHOLE, group=EFFORT, metavar="N",
           shown_default="as the profile says", help="how many cases of each property to play"),
    Option(key="out", kind=kinds.PATH, group=OUTPUT, metavar="DIR", shown_default="none",
           help=f"folder for {JSON} and {HTML}"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write every verdict there"),
    Option(key="html", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write a page with every verdict there"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no progress, only the clauses and the matrix"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


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
    seed: int = 0
    cases: int | None = None
    json: Path | None = None
    html: Path | None = None
    out: Path | None = None
    progress: str = "shown"


def resolve_conformance_request(
    command_line: Mapping[str, Any], file: Mapping[str, Any]
) -> ConformanceRequest:
    """Command line over configuration file over default."""
    values = dict(file) | dict(command_line)
    out = values.get("out")
    if out is not None:
        values = {"json": out / JSON, "html": out / HTML} | values
    values["progress"] = "hidden" if values.pop("quiet", False) else "shown"
    return ConformanceRequest(**values)
