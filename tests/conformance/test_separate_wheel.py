"""The wheel `equipoise-conformance` by itself judges a third party's backend.

In an environment that holds torch, hypothesis, what those two require, and nothing else.
"""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.timeout(900)

WATCHDOG = 300.0
REQUIRED = ("torch", "hypothesis")
ABSENT = ("numpy", "yaml", "tqdm", "nanobind", "equipoise._native", "equipoise.balancer")
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
JUDGE = (
    "--quiet",
    *("--ranks", "2", "--cases", "4"),
    *("--only", "ordering", "addresses", "resources", "determinism", "kernels"),
)


def call(*command: str | Path, folder: Path | None = None) -> str:
    """Standard output of a command that must succeed in a folder, without this tree on its path."""
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        [str(word) for word in command],
        env=free | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
        check=False,
        cwd=folder,
    )
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    assert "Warning" not in completed.stderr
    return completed.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from copies: a build leaves files beside the sources."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "src").symlink_to(ROOT / "src")
    for name in ("LICENSE", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    copy(ROOT / "conformance", tree / "conformance")
    build = (sys.executable, "-m", "pip", "wheel", *OFFLINE, "-w", tree / "out")
    call(*build, tree / "conformance")
    [built] = (tree / "out").iterdir()
    assert list((ROOT / "src").glob("equipoise_conformance*")) == [], "a build among the sources"
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the environment, with the wheel and the backend of the example."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    link_distributions(packages)
    copy(ROOT / "examples" / "third_party_backend", folder / "example")
    install = (sys.executable, "-m", "pip", "install", *OFFLINE, "--target", packages)
    call(*install, wheel)
    call(*install, folder / "example")
    return folder / "bin" / "python"


def copy(source: Path, target: Path) -> None:
    """The files of a folder, links followed, without what a build or an import left there."""
    for path in source.rglob("*"):
        kept = not {"__pycache__", "build"} & set(path.parts) and "egg-info" not in str(path)
        if path.is_file() and kept:
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def link_distributions(packages: Path) -> None:
    """Links to torch, hypothesis, and what they require of what is installed here."""
    packages.mkdir(parents=True, exist_ok=True)
    for name in required():
        for file in distribution(name).files or ():
            top = file.parts[0]
            place = packages / top
            if top not in ("..", "__pycache__", "bin") and not place.exists():
                place.symlink_to(Path(str(distribution(name).locate_file(top))).resolve())


def required() -> set[str]:
    """Names of these distributions."""
    names: set[str] = set()
    left = list(REQUIRED)
    while left:
        name = left.pop()
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another system
        if name not in names:
            names.add(name)
            plain = (line for line in requirements if "extra ==" not in line)
            left += [match[0] for line in plain if (match := re.match(r"[\w.-]+", line))]
    return names


def test_wheel_is_pure_and_requires_torch_and_hypothesis_only(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    required_names = re.findall(r"^Requires-Dist: ([\w-]+)", text, re.MULTILINE)
    assert sorted(required_names) == ["hypothesis", "torch"]
    assert "equipoise/hal/conformance/suite.py" in names
    assert [name for name in names if name.endswith((".so", ".cpp", ".pyi"))] == []


def test_wheel_alone_judges_third_party_backend(python: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = call(python, "-m", "equipoise.cli.conformance_command",
                "--backend", "inline", *JUDGE, "--html", page)  # fmt: skip
    assert "<h1>Conformance of inline with gloo</h1>" in page.read_text("utf-8")
    assert text.startswith("conformance of inline with gloo, up to 2 ranks")
    assert "this part of the contract is kept: " in text.splitlines()[-1]


def test_wheel_alone_judges_communicator_on_host(python: Path) -> None:
    text = call(python, "-m", "equipoise.cli.conformance_command", "--communicator", "gloo",
                "--ranks", "2", "--cases", "2", "--only", "determinism", "--quiet")  # fmt: skip
    assert text.startswith("conformance of gloo (on host), up to 2 ranks")


def test_wheel_alone_judges_expert_parallel_library(python: Path, tmp_path: Path) -> None:
    """The library of the page, in the working directory of the command, which is a script."""
    page = (ROOT / "docs" / "expert-parallel-conformance.md").read_text()
    [source] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "all_gather_library.py").write_text(source)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(python.parents[1])}))
    script = packages / "bin" / "equipoise-conformance"
    library = ("--expert-parallel", "all_gather_library:LIBRARY")
    options = ("--ranks", "2", "--cases", "2", "--quiet")
    text = call(python, script, *library, *options, folder=tmp_path)
    assert text.startswith("conformance of all_gather_library:LIBRARY (on host with gloo)")
    assert "the contract is kept: " in text.splitlines()[-1]


def test_wheel_environment_holds_no_other_package(python: Path) -> None:
    script = f"""
from importlib import import_module
for name in {ABSENT}:
    try:
        import_module(name)
    except ImportError:
        continue
    raise SystemExit(name + " is there")
"""
    assert call(python, "-c", script) == ""


def test_wheel_brings_its_command_and_its_adapters(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        [entries] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(entries).decode()
    assert "equipoise-conformance = equipoise.cli.conformance_command:main" in text
    assert "gloo = equipoise.backends.cpu:GLOO" in text
    assert "deep-ep = equipoise.integrations.expert_parallel.deep_ep:NORMAL" in text
    assert "fixed-capacity" not in text, "our exchange, which the wheel does not hold"
    assert "nccl = " not in text, "a communicator that the wheel does not hold"
