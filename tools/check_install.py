"""Checks by resolution alone that everybody can install what README tells them to install.

    python tools/check_install.py [CASE...]

Resolved are the `pip install` lines of README, with the default torch of the index, which brings
CUDA, and with the CPU build; the oldest torch that pyproject.toml admits; the project beside what
vllm-ascend pins, of which no version may change; and the environments of tox. All but the last on
every Python that pyproject.toml names, at its first release (3.11.0).

pip runs with `--dry-run`: it reads index pages and metadata, and downloads no wheel. Where the
index serves no metadata files, pip reads them out of the wheels by range requests (fast-deps):
15 MB for README's first line, 2 MB of them from torch's wheel. It needs a network, and fails
without one; EQUIPOISE_OFFLINE=1 skips it, with a line that fails `.ci/run`.
"""

import ast
import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OLDEST_PIP = (25, 3)
"""Older ones download all wheels of a dry run once it is resolved: gigabytes of CUDA libraries."""
TOX_PYTHON = "3.11"
LINE = re.compile(r"^(?:python3 -m )?pip install ([^&#\n]+)", re.MULTILINE)
SELF = re.compile(re.escape(PROJECT["project"]["name"]) + r"\[([\w,]+)\]")
CUDA_PACKAGE = re.compile(r"(nvidia|cuda|triton)\b")
VLLM_ASCEND = "vllm-ascend==0.23.0"
VLLM_ASCEND_TORCH = "torch==2.10.0"
VLLM_ASCEND_POST1 = "memcache_hybrid==1.2.0", "memfabric_hybrid==1.2.0"
"""What 0.23.0.post1, of which the index has the source only, requires otherwise than 0.23.0."""
NO_WHEEL = re.compile(r"(triton-ascend|arctic-inference)\b")
"""What they require and the index has no wheel of, in that version."""
LIMIT = 600.0
"""Seconds for one case."""
OFFLINE = "EQUIPOISE_OFFLINE"
SKIPPED = f"  check_install: SKIP, {OFFLINE} is set: nothing was resolved"
"""As tox says it of an environment, so that `.ci/run` takes it for a skipped one and fails."""
PINNED = re.compile(
    r"\(constraint\) (\S+?==\S+)|No matching distribution found for (\S+?==[^\s;]+)"
)
UNREACHABLE = re.compile(r"NewConnection|ConnectTimeout|ReadTimeout|NameResolution|Proxy|SSLError")
CARRIED_OPTIONS = (
    "cert",
    "client-cert",
    "index-url",
    "proxy",
    "retries",
    "timeout",
    "trusted-host",
)
"""Settings of pip by which it reaches the index. Others, such as `find-links`, could offer another
torch than the index does."""

# `--python-version` chooses wheels for another Python; pip still evaluates markers for the one
# that runs it (pypa/pip#13296), so they are told the version too.
RUN_PIP = """
import sys
from pip._vendor.packaging import markers

version = sys.argv[1]
known = {**markers.default_environment(), "python_version": version}
known["python_full_version"] = version + ".0"
markers.default_environment = lambda: known

from pip._internal.cli.main import main

sys.exit(main(sys.argv[2:]))
"""


class Unresolved(Exception):
    """pip found no set of versions; the message tells why."""


class Unreachable(Exception):
    """The package index does not answer: that says nothing about any case."""


@dataclass(frozen=True)
class Case:
    """Something to resolve, for one Python and one build of torch."""

    name: str
    python: str
    arguments: tuple[str, ...]
    """Of `pip install`, without what chooses the build of torch."""
    origin: str
    """File and line that tell people, or tox, to install this."""
    cpu: bool = False
    beside: tuple[str, ...] = ()
    """A package whose requirements are installed already, and further ones: all have to stay."""

    def __str__(self) -> str:
        """The case as it is printed."""
        return f"Python {self.python}{', CPU torch' if self.cpu else ''}: {self.name}"


def pythons() -> list[str]:
    """Versions of Python that pyproject.toml names."""
    pattern = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    return [match[1] for c in PROJECT["project"]["classifiers"] if (match := pattern.fullmatch(c))]


def requirements(extras: str = "") -> list[str]:
    """What the project requires, with what it requires to be built."""
    return [
        *PROJECT["project"]["dependencies"],
        *PROJECT["build-system"]["requires"],
        *extra_requirements(extras),
    ]


def extra_requirements(extras: str) -> Iterator[str]:
    """What extras bring; one that names others of the project brings what these do."""
    for extra in filter(None, extras.split(",")):
        for requirement in PROJECT["project"]["optional-dependencies"][extra]:
            others = SELF.fullmatch(requirement)
            yield from extra_requirements(others[1]) if others else [requirement]


def spelt_out(arguments: list[str]) -> tuple[str, ...]:
    """Arguments of pip, the project itself replaced by its requirements.

    It could be built, but only for the Python that runs this.
    """
    spelt: list[str] = []
    for argument in arguments:
        project = re.fullmatch(r"\.(?:\[(.+)\])?", argument)
        spelt += requirements(project[1] or "") if project else [argument]
    return tuple(spelt)


def readme_lines(text: str) -> list[str]:
    """Arguments of pip in the lines that README tells people to type."""
    return [match[1].strip() for match in LINE.finditer(text)]


def tox_environments(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and arguments of pip of every environment of tox that installs something.

    Left out are folders of this repository, and files of requirements: these are long, and tox
    installs them when it runs. What it does not show on a machine with the CPU build is whether the
    pins agree with the default torch.
    """
    settings = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    settings.read_string(text)
    for section in settings.sections():
        if not section.startswith("testenv:") or "deps" not in settings[section]:
            continue
        environment = settings[section]
        installed = filter(None, _expand(settings, environment["deps"]).splitlines())
        arguments = [a for a in installed if not a.startswith("-r") and not Path(a).is_dir()]
        if not environment.getboolean("skip_install", fallback=True):
            arguments += requirements(environment.get("extras", "").replace("\n", ","))
        variables = _expand(settings, environment.get("set_env", "{[testenv]set_env}"))
        constraint = re.search(r"^PIP_CONSTRAINT *= *(\S+)$", variables, re.MULTILINE)
        if constraint:
            arguments += ["-c", constraint[1]]
        yield section.removeprefix("testenv:"), tuple(arguments)


def _expand(settings: configparser.ConfigParser, value: str) -> str:
    """The value of a setting, references to other settings and the root of the tree inserted."""
    value = re.sub(r"\{\[(.+?)\](\w+)\}", lambda m: _expand(settings, settings[m[1]][m[2]]), value)
    return value.replace("{tox_root}", str(ROOT)).replace("{/}", "/")


def oldest_torch() -> str:
    """Oldest version of torch that the project admits."""
    (torch,) = PROJECT["project"]["optional-dependencies"]["torch"]
    return str(torch.removeprefix("torch>="))


def file_and_line(path: str, text: str) -> str:
    """File and line that first has a text."""
    lines = (ROOT / path).read_text("utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if text in line]
    return f"{path}:{numbers[0] if numbers else 1}"


def cases(readme: str) -> Iterator[Case]:
    """All that is resolved."""
    for python in pythons():
        for line in readme_lines(readme):
            arguments, origin = spelt_out(shlex.split(line)), file_and_line("README.md", line)
            yield Case(f"pip install {line}", python, arguments, origin)
            if any(argument.startswith("torch") for argument in arguments):
                yield Case(f"pip install {line}", python, arguments, origin, cpu=True)
        torch, origin = f"torch=={oldest_torch()}.*", file_and_line("pyproject.toml", '"torch>=')
        yield Case(
            f"pip install '.[torch]' {torch}", python, (*requirements("torch"), torch), origin
        )
        # torch_npu requires the CPU build of torch.
        name = f"pip install '.[torch]' beside {VLLM_ASCEND}"
        beside = (VLLM_ASCEND, *VLLM_ASCEND_POST1)
        yield Case(name, python, tuple(requirements("torch")), origin, cpu=True, beside=beside)
    for name, arguments in tox_environments((ROOT / "tox.ini").read_text("utf-8")):
        origin = file_and_line("tox.ini", f"[testenv:{name}]")
        yield Case(f"tox -e {name}", TOX_PYTHON, arguments, origin)


def where_to_change(case: Case, message: str) -> str:
    """Where to change what did not resolve, and the command that shows it again."""
    pins = sorted({requested or missing for requested, missing in PINNED.findall(message)})
    listed = [ROOT / path for option, path in pairwise(case.arguments) if option == "-c"]
    places = [
        file_and_line(os.path.relpath(file, ROOT), pin)
        for file in listed
        for pin in pins
        if pin in file.read_text("utf-8").splitlines()
    ]
    return (
        f"change: {', '.join([case.origin, *places])}\n"
        f"reproduce: python tools/check_install.py {shlex.quote(str(case))}"
    )


def wrong_claims(readme: str) -> Iterator[str]:
    """What README says otherwise than what is resolved."""
    for claim in (f"Python {' or '.join(pythons())}", f"torch {oldest_torch()} or newer"):
        if claim not in readme:
            yield f"README.md:1: does not say {claim!r}, which is what is resolved"
    if not any("." in shlex.split(line) or "'.[" in line for line in readme_lines(readme)):
        yield "README.md:1: no line installs the project"


def environment() -> dict[str, str]:
    """Variables for a pip that knows the index and nothing else."""
    free = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in CARRIED_OPTIONS:
            free[f"PIP_{key.replace('-', '_').upper()}"] = ast.literal_eval(value)
    return {**free, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def resolve(python: str, arguments: tuple[str, ...], variables: dict[str, str]) -> dict[str, Any]:
    """The packages that pip would install, by name; raises Unresolved and Unreachable."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        try:
            result = subprocess.run(
                [
                    *(sys.executable, "-c", RUN_PIP, python, "install", "--dry-run"),
                    *("--ignore-installed", "--only-binary", ":all:", "--python-version", python),
                    *("--use-feature", "fast-deps", "--report", str(report), *arguments),
                ],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Unresolved(f"pip did not end within {LIMIT:g} s") from error
        if result.returncode:
            if UNREACHABLE.search(result.stdout) and "conflict" not in result.stdout:
                raise Unreachable
            raise Unresolved(reason(result.stdout))
        resolution = json.loads(report.read_text("utf-8"))
    if resolution["environment"]["python_version"] != python:
        raise Unresolved(f"pip evaluated markers for {resolution['environment']['python_version']}")
    return {package["metadata"]["name"]: package["metadata"] for package in resolution["install"]}


def reason(output: str) -> str:
    """What pip says from its first error on, without its advice."""
    first_error = re.search(r"^(ERROR|The conflict is caused by)", output, re.MULTILINE)
    return output[first_error.start() if first_error else 0 :].partition("\nTo fix this")[0].strip()


def write_cpu_torch(folder: Path, pin: str, variables: dict[str, str]) -> None:
    """A wheel with nothing but the metadata of torch's CPU build, which another index serves.

    It requires what the default build does, less the packages of CUDA.
    """
    torch = resolve(TOX_PYTHON, (pin, "--no-deps"), variables)["torch"]
    required = [r for r in torch["requires_dist"] if not CUDA_PACKAGE.match(r)]
    label = f"{torch['version']}+cpu"
    metadata = ["Metadata-Version: 2.1", "Name: torch", f"Version: {label}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in required]
    wheel = ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    with zipfile.ZipFile(folder / f"torch-{label}-py3-none-any.whl", "w") as archive:
        for name, lines in (("METADATA", metadata), ("WHEEL", wheel), ("RECORD", [])):
            archive.writestr(f"torch-{label}.dist-info/{name}", "\n".join([*lines, ""]))


def torch_pin() -> str:
    """The torch that constraints.txt pins."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def installed_versions(
    case: Case, options: tuple[str, ...], variables: dict[str, str]
) -> tuple[str, ...]:
    """What is installed before a case, each in its version; raises Unresolved."""
    if not case.beside:
        return ()
    package, *others = case.beside
    (metadata,) = resolve(case.python, (package, "--no-deps"), variables).values()
    required = [r for r in metadata["requires_dist"] if not NO_WHEEL.match(r)]
    installed = resolve(case.python, (*required, *others, *options), variables)
    return tuple(f"{name}=={found['version']}" for name, found in installed.items())


def examine(case: Case, cpu_torch: Path, variables: dict[str, str]) -> str:
    """What a case resolves to, in words; raises Unresolved."""
    options = ("--find-links", str(cpu_torch)) if case.cpu else ()
    before = installed_versions(case, options, variables)
    packages = resolve(case.python, (*case.arguments, *before, *options), variables)
    torch = packages["torch"]["version"] if "torch" in packages else ""
    if torch and case.cpu != torch.endswith("+cpu"):
        raise Unresolved(f"the index gave torch {torch}")
    kept = f", {len(before)} of them unchanged" if before else ""
    return f"{len(packages)} packages{kept}" + (f", torch {torch}" if torch else "")


def check_all(selected_cases: list[Case], variables: dict[str, str]) -> bool:
    """Prints a line for each case, and tells whether all resolve; raises Unreachable."""
    resolved = True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        for pin in (torch_pin(), VLLM_ASCEND_TORCH):
            write_cpu_torch(Path(folder), pin, variables)
        outcomes = [pool.submit(examine, case, Path(folder), variables) for case in selected_cases]
        try:
            for case, outcome in zip(selected_cases, outcomes, strict=True):
                try:
                    print(f"ok      {case} ({outcome.result()})", flush=True)
                except Unresolved as error:
                    resolved = False
                    print(
                        f"FAILED  {case}",
                        error,
                        where_to_change(case, str(error)),
                        sep="\n",
                        flush=True,
                    )
        finally:
            pool.shutdown(cancel_futures=True)
    return resolved


def main(arguments: list[str]) -> int:
    """Resolves all cases, or those that are named; the exit status is 1 if one does not resolve."""
    readme = (ROOT / "README.md").read_text("utf-8")
    claims = list(wrong_claims(readme))
    print(*claims, sep="\n", end="\n" if claims else "")
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        print(SKIPPED)
        return 1 if claims else 0
    if tuple(int(part) for part in version("pip").split(".")[:2]) < OLDEST_PIP:
        print(f"check_install: pip {version('pip')} would download every wheel: upgrade pip")
        return 1
    selected_cases = [case for case in cases(readme) if not arguments or str(case) in arguments]
    if not selected_cases:
        print(f"check_install: no case is called {' or '.join(arguments)}")
        return 1
    try:
        resolved = check_all(selected_cases, environment())
    except Unreachable:
        print(f"check_install: the package index cannot be reached; {OFFLINE}=1 skips this check")
        return 1
    except Unresolved as error:
        # Of a torch from which a CPU build is derived.
        print(
            f"check_install: {error}",
            f"change: {file_and_line('constraints.txt', 'torch==')}",
            sep="\n",
        )
        return 1
    return 0 if resolved and not claims else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
