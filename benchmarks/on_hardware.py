"""One command for whoever has the hardware: runs everything and packs what came out.

    python benchmarks/on_hardware.py --backend ascend
    python benchmarks/on_hardware.py --backend ascend --ranks 8 --out report.tar.gz

Runs `equipoise doctor`, the conformance suite on one device and on several, the main job, and the
benchmarks that exist for the backend, one after the other; a step that fails or takes too long is
recorded and does not stop the rest; Ctrl-C ends the step that runs, and packs what is there.
Without `--ranks` it takes as many devices as there are, four at most. The archive holds the output,
exit code and time of each step, its JSON and HTML, and the versions of everything, so that a report
says what it was seen on. It holds no environment variable but those named in
`ENVIRONMENT_VARIABLES`, no host name and no path of the machine beyond what a step prints itself.
"""

import argparse
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
EQUIPOISE = (sys.executable, "-m", "equipoise")
PACKAGES = (
    *("equipoise", "torch", "torch_npu", "triton", "triton-ascend", "cuda-bindings", "vllm"),
    *("numpy", "hypothesis"),
)
ENVIRONMENT_VARIABLES = (
    *("ASCEND_HOME_PATH", "HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE", "TASK_QUEUE_ENABLE"),
    *("CUDA_VISIBLE_DEVICES", "NCCL_BUFFSIZE", "NCCL_MULTI_RANK_GPU_ENABLE"),
)
TOOLS = (("npu-smi", "info"), ("nvidia-smi",), ("lscpu",), ("uname", "-srm"))
LIMIT = 1800.0
"""Seconds that one step may take."""
TOOL_TIMEOUT = 30.0
"""Seconds that a tool may take to say what the machine is."""
GRACE = 10.0
"""Seconds that a step gets to end its ranks, once it is told to."""
RANKS, MOST = 4, 64
BENCHMARKS = {"cuda": {"cuda": "gpu_speed.py", "cuda_deep": "gpu_suites.py"}}
"""By backend and name of a step: its own benchmark, and its tests at full strength."""
ROOM = """
import sys
from equipoise.hal import registry
backend = registry.accelerator(sys.argv[1])
links = registry.communicator(backend.communicator)
print(int(sys.argv[2]) if links.capabilities.shared_devices else backend.devices())
"""
"""Prints how many ranks this machine has room for."""
INTERRUPTED = 130


@dataclass(frozen=True)
class Step:
    """A command whose outcome is worth having. Its files are named after it."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a step; an exit code of -1 means that it took longer than the limit, 130 that
    somebody interrupted it."""

    name: str
    command: str
    exit_code: int
    seconds: float


def steps(backend: str, ranks: int, folder: Path) -> list[Step]:
    """What is run, in this order."""

    def with_reports(name: str, *command: str) -> Step:
        files = ("--json", str(folder / f"{name}.json"), "--html", str(folder / f"{name}.html"))
        return Step(name, (*EQUIPOISE, *command, *files))

    suite = ("conformance", "--backend", backend, "--quiet", "--ranks")
    run = ("run", "--backend", backend, "--quiet", "--ranks")
    groups = [str(count) for count in sorted({2, ranks}) if count <= ranks]
    extra = BENCHMARKS.get(backend, {})
    return [
        Step("doctor", (*EQUIPOISE, "doctor")),
        *(with_reports(f"conformance-{n}", *suite, n) for n in dict.fromkeys(("1", str(ranks)))),
        *(with_reports(f"run-{n}", *run, n) for n in groups or ["1"]),
        *(
            Step(f"benchmark-{name}", (sys.executable, str(HERE / script)))
            for name, script in extra.items()
        ),
    ]


def perform(step: Step, folder: Path, limit: float) -> Outcome:
    """Run it; everything that it prints goes to a file of its name. Its ranks end with it."""
    began = time.monotonic()
    with (folder / f"{step.name}.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            step.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        except KeyboardInterrupt:
            code = INTERRUPTED
        end(process)
    seconds = round(time.monotonic() - began, 1)
    return Outcome(step.name, shlex.join(step.command[1:]), code, seconds)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Tell it to end, then end whatever is left of it."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def room(backend: str) -> int:
    """How many ranks there are devices for; raises RuntimeError where nobody can say."""
    result = subprocess.run(
        [sys.executable, "-c", ROOM, backend, str(MOST)],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(result.stderr.strip().splitlines()[-1])
    return int(result.stdout)


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    by_package = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return by_package


def machine(tools: Iterable[Sequence[str]] = TOOLS) -> dict[str, str]:
    """What the tools that exist here print about it."""
    outputs = {}
    for tool in tools:
        try:
            result = subprocess.run(
                tool, capture_output=True, text=True, timeout=TOOL_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            outputs[tool[0]] = f"{type(error).__name__}"
            continue
        outputs[tool[0]] = result.stdout
    return outputs


def pack(folder: Path, out: Path) -> None:
    """Everything in the folder, without owners."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(out, "w:gz") as archive:
        archive.add(folder, arcname="equipoise-report", filter=anonymous)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; everything is checked before hours are spent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="ascend", help="accelerator backend (ascend)")
    parser.add_argument("--ranks", type=int, help="ranks of the larger runs (devices, 4 at most)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds a step may take (1800)")
    parser.add_argument("--out", type=Path, default=Path("equipoise-report.tar.gz"), help="archive")
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help="these steps only")
    settings = parser.parse_args(arguments)
    if settings.ranks is not None and not 1 <= settings.ranks <= MOST:
        parser.error(f"--ranks is 1 to {MOST}, not {settings.ranks}")
    if not (math.isfinite(settings.limit) and settings.limit > 0):
        parser.error(f"--limit is a positive number of seconds, not {settings.limit:g}")
    if settings.out.is_dir() or not os.access(settings.out.absolute().parent, os.W_OK):
        parser.error(f"--out: {settings.out} cannot be written")
    settle(parser, settings)
    return settings


def settle(parser: argparse.ArgumentParser, settings: argparse.Namespace) -> None:
    """Fit the number of ranks to the machine, and know every step that is asked for."""
    try:
        device_count = room(settings.backend)
    except RuntimeError as error:
        parser.error(f"--backend {settings.backend}: {error}")
    if device_count < (settings.ranks or 1):
        parser.error(
            f"{settings.backend} has {device_count} device(s) here: see `equipoise doctor`"
        )
    settings.ranks = settings.ranks or min(RANKS, device_count)
    names = [step.name for step in steps(settings.backend, settings.ranks, Path())]
    if strange := sorted(set(settings.only) - set(names)):
        parser.error(f"--only: unknown {', '.join(strange)}; known: {', '.join(names)}")


def report(settings: argparse.Namespace, outcomes: Sequence[Outcome]) -> dict[str, object]:
    """What was run, on what, and what became of it."""
    return {
        "backend": settings.backend,
        "ranks": settings.ranks,
        "versions": versions(),
        "environment": {
            name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ
        },
        "machine": machine(),
        "steps": [asdict(outcome) for outcome in outcomes],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 when every step ended with 0, 130 when interrupted, else 1."""
    settings = options(arguments)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in steps(settings.backend, settings.ranks, folder):
            if settings.only and step.name not in settings.only:
                continue
            print(f"{step.name} ...", end=" ", flush=True)
            outcomes.append(perform(step, folder, settings.limit))
            print(f"exit code {outcomes[-1].exit_code}, {outcomes[-1].seconds:g} s", flush=True)
            if outcomes[-1].exit_code == INTERRUPTED:
                break
        content = json.dumps(report(settings, outcomes), indent=2)
        (folder / "report.json").write_text(content + "\n", encoding="utf-8")
        pack(folder, settings.out)
    print(f"packed into {settings.out}")
    codes = {outcome.exit_code for outcome in outcomes}
    return INTERRUPTED if INTERRUPTED in codes else int(codes != {0})


if __name__ == "__main__":
    sys.exit(main())
