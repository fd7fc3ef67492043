"""Builds the simulated driver where it is missing or old, by CMake."""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from npusim.errors import BuildFailed, Refused
from npusim.wheels import Wheel, find_torch, find_torch_npu

SOURCES = Path(__file__).resolve().parent
STALE = "NPUSIM_STALE"
"""Set while several people edit the sources: a failed build is told, and older libraries serve."""
JOBS = 2
"""Compilers at once: operators need 1 GiB of memory each."""


def main() -> int:
    """The command; returns its exit code."""
    try:
        print(ensure())
    except (Refused, BuildFailed) as error:
        print(f"npusim: {error}", file=sys.stderr)
        return 2
    return 0


def ensure() -> Path:
    """The simulated installation, up to date with sources, symbols, torch and torch_npu.

    Its libraries are in `lib64`. Several processes may ask at once: one builds, the others wait.
    Raises `Refused` when something is missing on this machine, `BuildFailed` with all output when
    a tool fails.
    """
    torch, torch_npu = find_torch(), find_torch_npu()
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    with _locked(where / "lock"):
        _forget_other_wheels(where / "tree", torch, torch_npu)
        _configure(where / "tree", torch, torch_npu)
        _compile(where / "tree")
    return where / "tree" / "cann"


def folder() -> Path:
    """Where it is built: NPUSIM_BUILD, or `build/npusim` at the top of the checkout."""
    chosen = os.environ.get("NPUSIM_BUILD")
    return Path(chosen).resolve() if chosen else SOURCES.parents[1] / "build" / "npusim"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by the tools, too: they may outlive this process when it is killed."""
    with path.open("w", encoding="utf-8") as file:
        os.set_inheritable(file.fileno(), True)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_other_wheels(tree: Path, torch: Wheel, torch_npu: Wheel) -> None:
    """Headers of another version may be older than the objects made from them: start anew."""
    stamp, wheels = tree / "wheels.txt", f"{torch}\n{torch_npu}\n{sys.executable}\n"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wheels:
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        stamp.write_text(wheels, encoding="utf-8")


def _configure(tree: Path, torch: Wheel, torch_npu: Wheel) -> None:
    """Run CMake once; afterwards the build itself sees changed lists and new files."""
    if (tree / "configured").exists():
        return
    ninja = _found("ninja")
    if ninja is None and _found("make") is None:
        raise Refused("neither ninja nor make is installed: pip install ninja")
    if _found(os.environ.get("CXX", "g++")) is None:
        raise Refused("no C++ compiler is installed: install g++, or name one in CXX")
    options = {
        "CMAKE_CXX_COMPILER": os.environ.get("CXX", "g++"),
        "NPUSIM_PYTHON": sys.executable,
        "NPUSIM_TORCH": torch.folder,
        "NPUSIM_TORCH_NPU": torch_npu.folder,
    } | ({"CMAKE_MAKE_PROGRAM": ninja} if ninja else {})
    generator = "Ninja" if ninja else "Unix Makefiles"
    given = [f"-D{name}={value}" for name, value in options.items()]
    _run([_tool("cmake"), "-S", str(SOURCES), "-B", str(tree), "-G", generator, *given])
    (tree / "configured").touch()


def _compile(tree: Path) -> None:
    """Everything that can be built, so that all errors are seen at once."""
    on = ["-k", "0"] if (tree / "build.ninja").exists() else ["-k"]
    try:
        _run([_tool("cmake"), "--build", str(tree), "--parallel", str(JOBS), "--", *on])
    except BuildFailed:
        if not os.environ.get(STALE):
            raise
        print(f"npusim: the build failed; {STALE} is set: older libraries serve", file=sys.stderr)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        close_fds=False,  # the lock
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildFailed(f"the build failed: {shlex.join(command)}\n{done.stdout}")


def _tool(name: str) -> str:
    found = _found(name)
    if found is None:
        raise Refused(f"{name} is not installed: pip install {name}")
    return found


def _found(name: str) -> str | None:
    """A program beside the interpreter (a virtual environment that is not active), or on PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join((beside, os.environ.get("PATH", os.defpath))))


if __name__ == "__main__":
    sys.exit(main())
