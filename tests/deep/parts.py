"""Parts of `tox -e deep`: what each proves, its commands, and their time limits."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from helpers.paths import ROOT, SEARCH_PATH
from npusim.errors import Refused
from npusim.wheels import find_torch
from vllm_cpu.fetch import FOLDER as VLLM

PYTHON = sys.executable
PYTHON312 = os.environ.get("EQUIPOISE_PYTHON312", "python3.12")
BUILD = ROOT / "build" / "deep"
"""What parts install and write, ignored by git."""
REPORT = "{report}"
"""Stands in a command for the file that its report goes to."""
BACKENDS = "tests/conformance/test_backends.py"
WORKERS = ("-n", "2", "--dist", "worksteal")
EVERYTHING = (
    "-q",
    "-m",
    "",
    "--timeout",
    "7200",
    "-o",
    "junit_family=xunit1",
    "--junitxml",
    REPORT,
)
"""Options of pytest: slow and deep tests too. The newer family of reports has no place for what
tests record."""
MINUTE, HOUR = 60.0, 3600.0


class Report(Enum):
    """What a command leaves besides its exit code."""

    NONE = "nothing"
    JUNIT = "tests in JUnit's form"
    TABLES = "rows by table, as JSON"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a part.

    Attributes:
        name: unique in its part.
        command: its words; `{report}` is the file for its report.
        limit: seconds after which it is ended.
        report: what it leaves besides its exit code.
        environment: variables to set, or to unset where the value is None.
        prepares: it installs something for the steps after it and proves nothing itself; where it
            fails, they are not run.
        python: the interpreter that it runs; the result shows its versions.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    report: Report = Report.NONE
    environment: Mapping[str, str | None] = field(default_factory=dict)
    prepares: bool = False
    python: str = PYTHON

    @property
    def shown(self) -> str:
        """The command as a user would type it in the repository."""
        words = []
        for word in self.command:
            name = Path(word).name
            words.append(name if word.startswith("/") and "bin" in Path(word).parts else word)
        if "--junitxml" in words:
            at = words.index("--junitxml")
            words[at - 2 : at + 2] = []
        text = shlex.join(word.replace(f"{ROOT}/", "") for word in words if word != REPORT)
        return text.replace("python -m equipoise", "equipoise")


def nothing() -> str | None:
    """Of a part that can be run everywhere."""
    return None


@dataclass(frozen=True, kw_only=True)
class Part:
    """What can be run by its name.

    Attributes:
        name: one word.
        proves: one sentence.
        takes: how long, on two cores, in words; an estimate where it was not measured.
        steps: made when the part is run.
        lacks: why it cannot be run here, if it cannot.
    """

    name: str
    proves: str
    takes: str
    steps: Callable[[], Sequence[Step]]
    lacks: Callable[[], str | None] = nothing

    @property
    def runs_pytest(self) -> bool:
        """Whether pytest runs a step of it, so that options for it have a meaning."""
        return any(step.report is Report.JUNIT for step in self.steps())


def tests(folder: str, hours: float, *options: str) -> Step:
    """pytest on a folder of the tests."""
    command = (PYTHON, "-m", "pytest", folder, *options, *EVERYTHING)
    return Step(name=folder, command=command, limit=hours * HOUR, report=Report.JUNIT)


def matrix() -> Sequence[Step]:
    """Every property on every mutant."""
    command = (PYTHON, "-m", "deep.matrix", "--json", REPORT)
    return (Step(name="mutants", command=command, limit=3 * HOUR, report=Report.TABLES),)


def conformance() -> Sequence[Step]:
    """The searches in one process."""
    return (tests("tests/conformance", 12, *WORKERS, "--ignore", BACKENDS),)


def backends() -> Sequence[Step]:
    """One command at a time: MPI ranks poll while they wait, and four of them leave no core."""
    chosen = {
        "third party": "third",
        "virtual": "virtual",
        "gloo, 1 and 4 ranks": "gloo and not 8",
        "MPI": "MPI",
        "gloo, 8 ranks": "gloo and 8",
    }
    return [
        replace(tests(BACKENDS, 8, "-k", words), name=f"{BACKENDS}, {name}")
        for name, words in chosen.items()
    ]


def exploration() -> Sequence[Step]:
    """Engine, channel and exchange, each a step."""
    kinds = ("engine", "channel", "exchange")
    return [tests(f"tests/exploration/{kind}", 4, *WORKERS) for kind in kinds]


def devices() -> Sequence[Step]:
    """The simulated driver has its own launcher, which runs pytest on tests/devices."""
    # Whole files to a process, as tox does: two suites of four ranks at once miss deadlines.
    workers = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    command = (PYTHON, "-m", "devices.launch", *workers, *EVERYTHING)
    step = Step(name="tests/devices", command=command, limit=12 * HOUR, report=Report.JUNIT)
    return (step,)


def no_cpu_torch() -> str | None:
    """Why torch_npu cannot be imported here."""
    try:
        find_torch()
    except Refused as refused:
        return str(refused)
    return None


def engines_python() -> str:
    """Interpreter of the environment that tox calls `engines`."""
    return os.environ.get("DEEP_ENGINES_PYTHON", str(ROOT / ".tox" / "engines" / "bin" / "python"))


def engines() -> Sequence[Step]:
    """All engines are in one environment; a file's tests of vLLM share what they have started.

    What stands in front on the path is the newest vLLM; the one that is installed is older.
    """
    python = engines_python()
    newest = {"PYTHONPATH": os.pathsep.join([engines_folder(python), SEARCH_PATH])}

    def tests_of_engines(
        name: str, folder: str, environment: Mapping[str, str | None] = MappingProxyType({})
    ) -> Step:
        together = ("-n", "2", "--dist", "loadfile")
        return Step(
            name=name,
            command=(python, "-m", "pytest", folder, *together, *EVERYTHING),
            limit=12 * HOUR,
            report=Report.JUNIT,
            environment=environment,
            python=python,
        )

    return (
        tests_of_engines("tests/engines", "tests/engines", newest),
        tests_of_engines("tests/engines/vllm, vLLM 0.32", "tests/engines/vllm"),
        *(
            Step(
                name=f"benchmarks/{name}",
                command=(python, f"benchmarks/{name}", "--quick"),
                limit=HOUR,
                environment=newest,
                python=python,
            )
            for name in ("vllm_policy.py", "vllm_ascend_policy.py", "sglang_policy.py")
        ),
    )


def engines_folder(python: str) -> str:
    """The newest vLLM in the environment of that interpreter."""
    return str(Path(python).parents[1] / VLLM.name)


def no_engines() -> str | None:
    """Whether tox has made the environment, of the package as it is now."""
    python = engines_python()
    if not Path(python).exists():
        return "`tox -e engines` makes the environment; run it first"
    command = [python, str(ROOT / "tools" / "check_installed.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() or None


def types() -> Sequence[Step]:
    """pyright is installed beside the environment: only this part needs it, and node with it."""
    folder = BUILD / "pyright"
    install = (*("-m", "pip", "install", "--quiet", "--target", str(folder)), "--upgrade")
    return (
        Step(
            name="install pyright",
            command=(PYTHON, *install, "-c", "constraints.txt", "pyright[nodejs]"),
            limit=20 * MINUTE,
            prepares=True,
        ),
        Step(
            name="pyright",
            command=(PYTHON, "-m", "pyright", "--pythonpath", PYTHON),
            limit=HOUR,
            environment={"PYTHONPATH": str(folder)},
        ),
    )


def ray() -> Sequence[Step]:
    """Ray has an environment of its own, without torch; the package is built into it."""
    folder, tests_of_ray = BUILD / "ray", "tests/engines/ray"
    python = str(folder / "bin" / "python")
    pip = (python, "-m", "pip", "install", "--quiet")
    pins = ("-c", f"{tests_of_ray}/constraints.txt")
    return (
        Step(
            name="make the environment",
            command=(PYTHON, "-m", "venv", "--clear", str(folder)),
            limit=10 * MINUTE,
            prepares=True,
        ),
        Step(
            name="install Ray",
            command=(*pip, "--no-compile", *pins, "-r", f"{tests_of_ray}/requirements.txt"),
            limit=20 * MINUTE,
            prepares=True,
        ),
        Step(
            name="install the package",
            command=(*pip, "--no-deps", "."),
            limit=20 * MINUTE,
            prepares=True,
        ),
        Step(
            name=tests_of_ray,
            # The settings of all tests, which are above, ask for torch.
            command=(
                python,
                "-m",
                "pytest",
                tests_of_ray,
                "--confcutdir",
                "tests/engines",
                *EVERYTHING,
            ),
            limit=HOUR,
            report=Report.JUNIT,
            environment={"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": SEARCH_PATH},
            python=python,
        ),
    )


def python312() -> Sequence[Step]:
    """The first commands of README, as written there, in an environment of Python 3.12."""
    folder = BUILD / "python312"
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return (
        Step(
            name="make the environment",
            command=(PYTHON312, "-m", "venv", "--clear", str(folder)),
            limit=10 * MINUTE,
            prepares=True,
        ),
        Step(
            name="the first command of README",
            command=("bash", "-euc", first_command(ROOT / "README.md")),
            limit=HOUR,
            environment={"PATH": path, "VIRTUAL_ENV": str(folder), "PYTHONPATH": None},
            python=str(folder / "bin" / "python"),
        ),
    )


def first_command(page: Path) -> str:
    """What the first block of shell on a page says."""
    return page.read_text("utf-8").partition("```bash\n")[2].partition("\n```")[0]


def no_python312() -> str | None:
    """Why there is none. A shim of that name may be there though no interpreter is."""
    if shutil.which(PYTHON312):
        done = subprocess.run([PYTHON312, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return None
    return f"{PYTHON312} is not here; EQUIPOISE_PYTHON312 may name it"


PARTS = (
    Part(
        name="unit",
        proves="every unit test and every property of it, with 5,000 examples instead of 100",
        takes="hours (estimate)",
        steps=lambda: (tests("tests/unit", 10, *WORKERS),),
    ),
    Part(
        name="processes",
        proves="ranks, runs, proxies and the CPU backends as processes; the whole matrix of faults "
        "by state of a rebalance; 10,000 rebalances on each path without growth",
        takes="20 minutes",
        steps=lambda: (tests("tests/processes", 8, *WORKERS),),
    ),
    Part(
        name="conformance",
        proves="no false alarm on the virtual backend from 20 seeds; every mutant is rejected",
        takes="20 minutes",
        steps=conformance,
    ),
    Part(
        name="backends",
        proves="our backends keep the contract with the profile `deep`, on one rank to eight, over "
        "gloo and MPI",
        takes="two hours",
        steps=backends,
    ),
    Part(
        name="matrix",
        proves="which properties reject which mutant: the page docs/conformance-matrix.md",
        takes="half an hour (estimate)",
        steps=matrix,
    ),
    Part(
        name="exploration",
        proves="20,000 interleavings of the engine, 40,000 of channels, 5,000 of the exchange; "
        "every mutant of the three is rejected",
        takes="half an hour (estimate; 18 minutes without mutants)",
        steps=exploration,
    ),
    Part(
        name="devices",
        proves="the Ascend and CUDA backends over the simulated driver: the contract on every "
        "schedule, every broken backend caught 20 times of 20, every planted race shown",
        takes="75 minutes",
        steps=devices,
        lacks=no_cpu_torch,
    ),
    Part(
        name="engines",
        proves="vLLM 0.33 and 0.32, and vllm-ascend, in every mode keep their tokens; every "
        "planted fault shows",
        takes="an hour (estimate)",
        steps=engines,
        lacks=no_engines,
    ),
    Part(
        name="ray",
        proves="a real Ray Serve with the request router: of three replicas one is killed, and no "
        "request is lost that had not begun; callers give up; two routers share the replicas",
        takes="five minutes",
        steps=ray,
    ),
    Part(
        name="benchmarks",
        proves="every benchmark runs to its end, in small",
        takes="a quarter of an hour (estimate)",
        steps=lambda: (tests("tests/benchmarks", 3),),
    ),
    Part(
        name="types",
        proves="pyright, a second type checker, finds nothing in the package (mypy: every commit)",
        takes="five minutes (estimate)",
        steps=types,
    ),
    Part(
        name="python312",
        proves="README's first command installs and runs on Python 3.12",
        takes="ten minutes (estimate)",
        steps=python312,
        lacks=no_python312,
    ),
)


def chosen(names: Iterable[str]) -> list[Part]:
    """Parts by name, in the order of this file; all where no name is given.

    Raises ValueError for a name that no part has.
    """
    wanted = list(names)
    known = [part.name for part in PARTS]
    if strange := [name for name in wanted if name not in known]:
        raise ValueError(f"no part {', '.join(strange)}; parts are {', '.join(known)}")
    return [part for part in PARTS if not wanted or part.name in wanted]
