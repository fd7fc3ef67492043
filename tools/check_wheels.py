"""Builds sdist and wheels as a release has them, and shows that each installs and runs.

    python tools/check_wheels.py [--out DIR]

Run by `tox -e wheels`. The sdist is built from a copy of the tracked files, and the wheels from the
sdist, for every Python that pyproject.toml names and that is here; a missing one is said and left
out. auditwheel gives each its manylinux tag, which follows from the C and C++ libraries of this
machine: a wheel for older systems is built on one of them. `equipoise-conformance` is built, too.

Each wheel is looked into, then installed in a fresh environment without torch, where everything
that needs none has to run. On the Python of tox the extra `demo` follows, and a short `equipoise
run`; then the wheel of the conformance suite takes its place and judges the example of a third
party. Exit code 1 at the first thing that is not so. Takes minutes; needs a network and a compiler.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from check_install import TOX_PYTHON, pythons
from check_installed import PACKAGE, modules
from check_tree import FOREIGN

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION = PROJECT["version"]
LIMIT = 900.0
"""Seconds for one command; the longest installs torch."""
NO_DATA = frozenset({".py", ".pyc", ".so"})
LICENCES = ("licenses/nanobind.txt", "licenses/robin_map.txt")
"""Of what is compiled into the native core."""
COMPILED_IN = re.compile(rb"(?<![\w.])/(?:tmp|home|root|Users|build)/[\w./-]+")
"""Paths of the machine that compiled a library: names of headers, in debug information."""
COUNTS = "import numpy; numpy.save('counts.npy', numpy.arange(48).reshape(2, 3, 8) ** 2)"
SHAPE = ("--ranks", "4")
WITHOUT_TORCH = (
    ("plan", "counts.npy", *SHAPE, "--slots", "12", "-o", "map.json"),
    ("report", "counts.npy", "--placement", "map.json", "--html", "report.html"),
    ("convert", "map.json", "map.yaml"),
    ("advise", "counts.npy", *SHAPE),
    ("replay", "counts.npy", *SHAPE, "--engine", "equipoise"),
    ("simulate", "--workload", "prop", "--workers", "2", "--requests", "40"),
    ("route", "--help"),
    ("picker", "--help"),
)
PROXY = ("route", "--workers", "http://127.0.0.1:9", "--slots", "1", "--port", "0")
MISSING = "torch is missing: pip install '.[torch]' in a clone of equipoise"
RUN = ("run", "--variants", "local", "--steps", "72", "--out", "run")
JUDGE = ("--backend", "inline", "--ranks", "2", "--cases", "4", "--only", "ordering", "--quiet")


class Fault(Exception):
    """Something that a release must not have."""


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment; commands run in its folder, without this tree on the path."""

    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def install(self, *arguments: str) -> None:
        """Run `pip install`."""
        call(self.python, "-m", "pip", "install", "-q", *arguments, cwd=self.folder)

    def equipoise(self, *arguments: str, code: int = 0) -> str:
        """Both outputs of `equipoise`, which has to end with that exit code."""
        return call(str(self.folder / "bin" / "equipoise"), *arguments, cwd=self.folder, code=code)


def call(*command: str, cwd: Path = ROOT, code: int = 0) -> str:
    """Both outputs of a command; raises Fault where it ends with another exit code."""
    completed = subprocess.run(
        command,
        cwd=cwd,
        env=free_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if completed.returncode != code:
        raise Fault(f"{command} ended with {completed.returncode}:\n{completed.stdout}")
    return completed.stdout


def free_environment() -> dict[str, str]:
    """Variables without those by which this tree would be found."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def interpreters() -> dict[str, str]:
    """Interpreters that are here, by version; EQUIPOISE_PYTHON312 and such may name one."""
    found = {}
    for version in pythons():
        variable = f"EQUIPOISE_PYTHON{version.replace('.', '')}"
        name = os.environ.get(variable, f"python{version}")
        # A shim of that name may be there though no interpreter is.
        works = (
            shutil.which(name)
            and not subprocess.run(
                [name, "-c", ""], env=free_environment(), capture_output=True, check=False
            ).returncode
        )
        if works:
            found[version] = name
        else:
            print(f"{name} is not here and is left out; {variable} may name it", flush=True)
    return found


def copy_tracked(target: Path) -> None:
    """The tracked files of this tree, links as links: a build leaves files beside the sources."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place, follow_symlinks=False)


def build(out: Path, python_of: Mapping[str, str], scratch: Path) -> dict[str, Path]:
    """The wheels by Python, and that of the conformance suite as `conformance`."""
    tree = scratch / "tree"
    copy_tracked(tree)
    call(sys.executable, "-m", "build", "--sdist", "--outdir", str(out), str(tree))
    [sdist] = out.glob("*.tar.gz")
    wheels = {}
    for version, python in python_of.items():
        built = scratch / version
        call(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(built), str(sdist))
        [wheel] = built.iterdir()
        call(
            *(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto"),
            *("-w", str(scratch / "repaired"), str(wheel)),
        )
        [repaired] = (scratch / "repaired").glob(f"*-cp{version.replace('.', '')}-*")
        wheels[version] = Path(shutil.copy2(repaired, out))
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out))
    call(*pip, str(tree / "conformance"))
    [wheels["conformance"]] = out.glob("equipoise_conformance-*.whl")
    return wheels


def data_files(folder: Path) -> dict[str, bytes]:
    """Content of what is no code: weights, texts, templates, types; links are followed."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            inner = data_files(path)
            found.update({f"{path.name}/{name}": content for name, content in inner.items()})
        elif path.is_file() and path.suffix not in NO_DATA:
            found[path.name] = path.read_bytes()
    return found


def faults(contents: Mapping[str, bytes]) -> Iterator[str]:
    """What a wheel of `equipoise` has and must not have, or lacks; contents by path."""
    information = f"equipoise-{VERSION}.dist-info/"
    package = {
        name.removeprefix("equipoise/"): content
        for name, content in contents.items()
        if name.startswith("equipoise/")
    }
    for name in contents:
        if not name.startswith(("equipoise/", information)):
            yield f"{name} is not of the package"
    ours = {**modules(PACKAGE), **data_files(PACKAGE)}
    theirs = {name: content for name, content in package.items() if name not in LICENCES}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name) and not name.endswith(".so"):
            yield f"equipoise/{name} is not as in the tree"
    for name in LICENCES:
        if name not in package:
            yield f"equipoise/{name} is missing"
    if not any(re.fullmatch(r"_native\.cpython-\d+-.+\.so", name) for name in package):
        yield "the native core is missing"
    if f"{information}licenses/LICENSE" not in contents:
        yield "the licence is missing"
    metadata = contents.get(f"{information}METADATA", b"").decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*; extra)", metadata, re.MULTILINE)
    if set(required) & {"torch", "torch_npu", "triton"} or not required:
        yield f"requires {', '.join(required) or 'nothing'} where no extra is named"
    for name, content in contents.items():
        yield from (f"{name} says {path}" for path in machine_paths(name, content))


def machine_paths(name: str, content: bytes) -> Iterator[str]:
    """Paths of the machine that built it."""
    if name.endswith(".so"):
        yield from sorted({path.decode() for path in COMPILED_IN.findall(content)})
    elif name.endswith((".py", ".pyi", ".md", ".yaml", ".txt", "METADATA", "RECORD")):
        yield from sorted({match[0] for match in FOREIGN.finditer(content.decode())})


def look_into(wheel: Path) -> None:
    """Raises Fault with all that is wrong with its contents; prints its tag and size."""
    with ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    if found := list(faults(contents)):
        raise Fault(f"{wheel.name}:\n" + "\n".join(found))
    if "manylinux" not in wheel.name:
        raise Fault(f"{wheel.name} has no manylinux tag")
    print(f"ok      {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB", flush=True)


def try_without_torch(environment: Environment, wheel: Path) -> None:
    """Install the wheel for operators of proxy and picker, and run what needs no torch."""
    environment.install(f"{wheel}[serve,picker]", "-c", str(ROOT / "constraints.txt"))
    call(environment.python, "-c", "import torch", cwd=environment.folder, code=1)
    call(environment.python, "-c", COUNTS, cwd=environment.folder)
    require(environment.equipoise("--version") == f"equipoise {VERSION}\n", "--version")
    for command in WITHOUT_TORCH:
        environment.equipoise(*command)
    require(MISSING in " ".join(environment.equipoise("doctor", code=1).split()), "doctor")
    require(environment.equipoise("run", code=2) == f"equipoise: error: {MISSING}\n", "run")
    serve_once(environment)
    print(f"ok      {wheel.name} without torch: {len(WITHOUT_TORCH)} commands, the proxy")


def serve_once(environment: Environment) -> None:
    """Start the proxy, and end it as an operator does."""
    with subprocess.Popen(
        [str(environment.folder / "bin" / "equipoise"), *PROXY],
        cwd=environment.folder,
        env=free_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as proxy:
        assert proxy.stderr is not None
        # A proxy that says nothing would be read from for ever.
        watchdog = threading.Timer(LIMIT, proxy.kill)
        watchdog.start()
        try:
            line = proxy.stderr.readline()
            proxy.send_signal(signal.SIGTERM)
            proxy.communicate(timeout=LIMIT)
        finally:
            watchdog.cancel()
            proxy.kill()
    require("serving on http://127.0.0.1:" in line and proxy.returncode == 0, f"proxy: {line}")


def try_with_torch(environment: Environment, wheel: Path) -> None:
    """Install the extra that README installs, and serve for a few steps."""
    environment.install(f"{wheel}[demo]", "-c", str(ROOT / "constraints.txt"))
    environment.equipoise("doctor")
    require("outputs identical" in environment.equipoise(*RUN), "run: outputs are not compared")
    require((environment.folder / "run" / "report.html").exists(), "run: no report")
    print(f"ok      {wheel.name}[demo]: equipoise {' '.join(RUN)}", flush=True)


def try_conformance(environment: Environment, wheel: Path) -> None:
    """The suite by itself, in the place of the package, judges the example of a third party."""
    call(environment.python, "-m", "pip", "uninstall", "-q", "-y", "equipoise")
    environment.install(str(wheel), "-c", str(ROOT / "constraints.txt"))
    example = environment.folder / "third_party_backend"
    shutil.copytree(ROOT / "examples" / "third_party_backend", example)
    environment.install("--no-deps", str(example))
    judged = call(
        str(environment.folder / "bin" / "equipoise-conformance"), *JUDGE, cwd=environment.folder
    )
    require("this part of the contract is kept" in judged, f"conformance: {judged}")
    print(f"ok      {wheel.name}: equipoise-conformance {' '.join(JUDGE)}", flush=True)


def require(condition: bool, what: str) -> None:
    """Raises Fault with what is not so."""
    if not condition:
        raise Fault(what)


def check(out: Path) -> None:
    """Build everything into `out`, then try it; raises Fault."""
    python_of = interpreters()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wheels = build(out, python_of, scratch)
        for version, python in python_of.items():
            look_into(wheels[version])
            environment = Environment(scratch / f"environment-{version}")
            call(python, "-m", "venv", str(environment.folder))
            try_without_torch(environment, wheels[version])
            if version == TOX_PYTHON:
                try_with_torch(environment, wheels[version])
                try_conformance(environment, wheels["conformance"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Builds and tries what a release consists of.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="an empty or new folder")
    out: Path = parser.parse_args().out.resolve()
    if out.exists() and any(out.iterdir()):
        print(f"check_wheels: {out} is not empty")
        return 1
    out.mkdir(parents=True, exist_ok=True)
    try:
        check(out)
    except Fault as fault:
        print(f"FAILED  {fault}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
