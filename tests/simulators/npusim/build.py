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
COMPILER = "CXX"
"""The variable that names another compiler: a command, maybe with a wrapper and options."""
LIBRARIES = (
    "ascendcl",
    "hccl",
    "opapi",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
)
"""What the installation must hold in the end."""
JOBS = 2
"""Compilers at once: operators need 1 GiB of memory each."""


def main() -> int:
    """The command; returns its exit code."""
    try:
        print(ensure())
    except (Refused, BuildFailed) as error:
        print(f"npusim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("npusim: interrupted", file=sys.stderr)
        return 130
    return 0


def ensure() -> Path:
    """The simulated installation, up to date with sources, symbols, torch and torch_npu.

    Its libraries are in `lib64`. Several processes may ask at once: one builds, the others wait.
    Raises `Refused` when something is missing on this machine, `BuildFailed` with all output when
    a tool fails.
    """
    torch, torch_npu = find_torch(), find_torch_npu()
    where = _usable(folder())
    with _locked(where / "lock"):
        _forget_other_makers(where / "tree", torch, torch_npu)
        _configure(where / "tree", torch, torch_npu)
        _compile(where / "tree")
        _check(where / "tree" / "cann" / "lib64")
    return where / "tree" / "cann"


def folder() -> Path:
    """Where it is built: NPUSIM_BUILD, or `build/npusim` at the top of the checkout."""
    variable = os.environ.get("NPUSIM_BUILD")
    return Path(variable).resolve() if variable else SOURCES.parents[2] / "build" / "npusim"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by the tools, too: they may outlive this process when it is killed."""
    with path.open("w", encoding="utf-8") as file:
        os.set_inheritable(file.fileno(), True)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _usable(where: Path) -> Path:
    """The folder, which can be written to."""
    try:
        where.mkdir(parents=True, exist_ok=True)
        with (where / "lock").open("a", encoding="utf-8"):
            return where
    except OSError as error:
        raise Refused(f"cannot build in {where}: {error.strerror}; see NPUSIM_BUILD") from error


def _forget_other_makers(tree: Path, torch: Wheel, torch_npu: Wheel) -> None:
    """Headers of another version may be older than the objects made from them: start anew.

    So do we for another compiler: CMake keeps the first one.
    """
    stamp = tree / "makers.txt"
    makers = f"{torch}\n{torch_npu}\n{sys.executable}\n{shlex.join(_compiler())}\n"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != makers:
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        stamp.write_text(makers, encoding="utf-8")


def _compiler() -> list[str]:
    """The compiler's command: maybe a wrapper first, as in `ccache g++`."""
    try:
        command = shlex.split(os.environ.get(COMPILER, ""))
    except ValueError as error:
        raise Refused(f"{COMPILER} cannot be read: {error}") from error
    return command or ["g++"]


def _configure(tree: Path, torch: Wheel, torch_npu: Wheel) -> None:
    """Run CMake once; afterwards the build itself sees changed lists and new files."""
    if (tree / "configured").exists():
        return
    ninja = _find_program("ninja")
    if ninja is None and _find_program("make") is None:
        raise Refused("neither ninja nor make is installed: pip install ninja")
    if _find_program(_compiler()[0]) is None:
        raise Refused("no C++ compiler is installed: install g++, or name one in CXX")
    options = {  # a list with semicolons is how CMake takes a command of several words
        "CMAKE_CXX_COMPILER": ";".join(_compiler()),
        "NPUSIM_PYTHON": sys.executable,
        "NPUSIM_TORCH": torch.folder,
        "NPUSIM_TORCH_NPU": torch_npu.folder,
    } | ({"CMAKE_MAKE_PROGRAM": ninja} if ninja else {})
    generator = "Ninja" if ninja else "Unix Makefiles"
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    _run([_tool("cmake"), "-S", str(SOURCES), "-B", str(tree), "-G", generator, *definitions])
    (tree / "configured").touch()


def _compile(tree: Path) -> None:
    """Everything that can be built, so that all errors are seen at once."""
    on = ["-k", "0"] if (tree / "build.ninja").exists() else ["-k"]
    _run([_tool("cmake"), "--build", str(tree), "--parallel", str(JOBS), "--", *on])


def _check(libraries: Path) -> None:
    """A compiler that does nothing succeeds at it."""
    missing = [name for name in LIBRARIES if not (libraries / f"lib{name}.so").is_file()]
    if missing:
        command = shlex.join(_compiler())
        raise BuildFailed(f"{command} made no lib{missing[0]}.so: is it a C++ compiler?")


def _run(command: Sequence[str]) -> None:
    completed = subprocess.run(
        command,
        close_fds=False,  # the lock
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        raise BuildFailed(f"the build failed: {shlex.join(command)}\n{completed.stdout}")


def _tool(name: str) -> str:
    path = _find_program(name)
    if path is None:
        raise Refused(f"{name} is not installed: pip install {name}")
    return path


def _find_program(name: str) -> str | None:
    """A program beside the interpreter (a virtual environment that is not active), or on PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join((beside, os.environ.get("PATH", os.defpath))))


if __name__ == "__main__":
    sys.exit(main())
