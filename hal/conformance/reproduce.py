"""A violation as a Python file that anybody can run, and what such a file calls.

Imports little: a file sets what libraries read from the environment before they are imported.
"""

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.hal.conformance.profile import Executor
from equipoise.hal.conformance.program import Argument, Case, Step
from equipoise.hal.errors import BackendUnavailable, UsageError, Violation
from equipoise.hal.support.working_directory import search_working_directory

if TYPE_CHECKING:
    from equipoise.hal.conformance.result import Finding, SuiteResult

EXIT_HELD, EXIT_VIOLATED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
PLAYS = {Executor.VIRTUAL: 1, Executor.DEVICE: 20, Executor.RANKS: 20}
"""How often a file plays its program: on a controlled world once tells; elsewhere a race may not
show at once."""
MAX_WHAT_LINES = 20
"""Lines of what was seen that a file quotes: a rank that hangs is reported with its stacks."""
PLAIN = re.compile(r"[\w .:/-]*", re.ASCII)
"""Names, which Python writes in double quotes as they are."""
FOLDER = "violations"
"""Where `--out DIR` puts the files."""
MARK = "REPRODUCTION = Reproduction("
"""A line of every file that `python_source` writes."""


def set_library_defaults() -> None:
    """Set what libraries read, or say, when they are imported, unless the user has set it."""
    # Sockets of torch's store warn of host names that are not needed here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Extensions of torch load when a backend asks for them.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # The suite launches beside streams that it holds. CUDA loads a kernel with its first launch,
    # which waits for such a stream, unless it is told beforehand to load everything at its start.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # The suite by itself does without numpy; torch warns where it is not installed.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One case of a property, and where it is played.

    Attributes:
        property: name of the property.
        executor: where it was played: `virtual`, `device` or `ranks`.
        backend: the accelerator backend by name, or PACKAGE:OBJECT.
        communicator: the communicator backend, likewise.
        case: the program, with its schedule.
        steer: receives the schedule before the case, as PACKAGE:OBJECT; None where nothing does.
        library: the expert-parallel library that is judged, likewise; None where none is.
    """

    property: str
    executor: str
    backend: str
    communicator: str
    case: Case
    steer: str | None = None
    library: str | None = None

    def main(self) -> int:
        """Play the program, and print what was seen: 1 where a clause is violated, 0 where none is.

        2, with one line on standard error, where it cannot be played here.
        """
        set_library_defaults()
        search_working_directory()
        try:
            return self._play()
        except (BackendUnavailable, UsageError) as error:
            print(f"cannot be played: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED

    def _play(self) -> int:
        # Imported here: torch reads its environment when it is imported.
        from equipoise.hal import registry
        from equipoise.hal.conformance import runner, suite
        from equipoise.hal.conformance.executors import launched

        try:
            prop, executor = suite.find(self.property), Executor(self.executor)
        except (KeyError, ValueError):
            raise UsageError(f"no {self.executor} plays a property {self.property!r}") from None
        rendezvous = None
        if self.communicator:  # else a device by itself
            rendezvous = registry.communicator(self.communicator).launcher_rendezvous()
        if rendezvous is not None and rendezvous.rank > 0:
            launched.serve_rank(self.backend, self.communicator, rendezvous, self.library)
            return EXIT_HELD
        place = runner.SubjectPlace(
            self.backend, self.communicator, self.case.program.size, self.steer, self.library
        )
        with closing(runner.open_subject(executor, place, rendezvous)) as subject:
            for _ in range(PLAYS[executor]):
                try:
                    subject.play(prop, self.case)
                except Violation as violation:
                    print(violation)
                    return EXIT_VIOLATED
        print(f"held: {self.property}, played {PLAYS[executor]} times")
        return EXIT_HELD


def reproduction_of(result: "SuiteResult", finding: "Finding") -> Reproduction:
    """The case that a property found. Raises `ValueError` where it found none."""
    from equipoise.hal.conformance.search import PropertyViolated

    if not isinstance(finding.verdict, PropertyViolated):
        raise ValueError(f"{finding.property_name} is not violated")
    return Reproduction(
        property=finding.property_name,
        executor=finding.executor,
        backend=result.backend,
        communicator=result.communicator,
        case=finding.verdict.case,
        steer=result.steer,
        library=result.library,
    )


def remove_programs(folder: Path) -> None:
    """Remove the files of an earlier run from a folder, and nothing that was not written by one.

    Raises `OSError` where one cannot be removed.
    """
    for path in sorted(folder.glob("*.py")):
        if path.is_file() and MARK in path.read_text("utf-8", errors="replace").splitlines():
            path.unlink()


def python_source(reproduction: Reproduction, about: str, what: str) -> str:
    """The text of a file that plays it; `about` says what was judged, `what` what was seen."""
    lines = [
        _comment(f"{reproduction.property}: {about}"),
        "#",
        *(_comment(line) for line in what.splitlines()[:MAX_WHAT_LINES]),
        "#",
        *(_comment(f"    {line}") for line in reproduction.case.program.lines()),
        "#",
        "# Exit code 1 and what was seen where it shows again, 0 where it does not. It takes",
        "# torch, hypothesis, the backend, and equipoise or equipoise-conformance.",
        "",
        "from equipoise.hal.conformance.program import Case, Program, Step",
        "from equipoise.hal.conformance.reproduce import Reproduction",
        "",
        MARK,
        *(
            f"    {name}={_literal(getattr(reproduction, name))},"
            for name in ("property", "executor", "backend", "communicator")
        ),
        *(
            f"    {name}={_literal(value)},"
            for name in ("steer", "library")
            if (value := getattr(reproduction, name)) is not None
        ),
        *_case_lines(reproduction.case),
        ")",
        "",
        'if __name__ == "__main__":',
        "    raise SystemExit(REPRODUCTION.main())",
    ]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    """One line: what a backend says may hold characters that end one."""
    return f"# {''.join(c if c.isprintable() else '?' for c in text)}".rstrip()


def _case_lines(case: Case) -> Iterator[str]:
    yield "    case=Case("
    yield "        Program("
    yield "            steps=("
    for step in case.program.steps:
        yield f"                {_step(step)},"
    yield "            ),"
    yield f"            size={case.program.size},"
    if case.program.settings:
        pairs = ", ".join(f"({_literal(k)}, {_literal(v)})" for k, v in case.program.settings)
        yield f"            settings=({pairs},),"
    yield "        ),"
    if case.schedule:
        yield f'        schedule=bytes.fromhex("{case.schedule.hex()}"),'
    yield "    ),"


def _step(step: Step) -> str:
    parts = [_literal(step.op)]
    if step.args:
        inner = ", ".join(map(_literal, step.args))
        parts.append(f"({inner},)" if len(step.args) == 1 else f"({inner})")
    if step.rank >= 0:
        parts.append(f"rank={step.rank}")
    if step.thread:
        parts.append(f"thread={step.thread}")
    return f"Step({', '.join(parts)})"


def _literal(value: Argument) -> str:
    """A number or a text in Python; names in double quotes."""
    if isinstance(value, str) and PLAIN.fullmatch(value):
        return f'"{value}"'
    return repr(value)
