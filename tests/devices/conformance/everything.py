"""Everything that is run over the simulated driver, one step after the other.

    python -m devices.conformance.everything              minutes: what CI runs
    python -m devices.conformance.everything --deep       an hour or two: all cases, all schedules

Ends with the first step that fails, or is not done after half an hour (ten hours with --deep): a
race may hang, and then it is to be seen where. Where torch is not a CPU build there is nothing to
run: a line says so, as tox says that it skips an environment. What follows goes to pytest.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from npusim.errors import Refused
from npusim.wheels import find_torch

PYTHON = sys.executable
SUITE = (PYTHON, "-m", "equipoise", "conformance", "--backend", "ascend", "--quiet")
RUN = (PYTHON, "-m", "equipoise", "run", "--backend", "ascend", "--quiet")
TRIAL = (PYTHON, "-m", "devices.conformance.trial")
NCCL = (
    *(PYTHON, "-m", "equipoise", "conformance", "--quiet"),
    *("--backend", "cudasim:BACKEND", "--communicator", "cudasim.nccl:NCCL", "--ranks", "4"),
    *("--only", "progress", "shapes", "keepalive", "failures", "determinism", "faults"),
)
"""What is NCCL's own, over a stand-in for NCCL."""
STEER = ("--steer", "npusim.steering:steer")
TESTS = ("tests/backends", "tests/demo", "tests/devices/test_routed_rows.py")
LONGEST = 1800.0
LONGEST_DEEP = 36_000.0
"""Seconds that a step may take."""
TIMED_OUT = 124
GRACE = 0.5
"""Seconds for stacks to be printed."""
STEERED = ("ordering", "locks", "visibility", "addresses", "kernels", "resources")
"""Families that take one device, and a schedule."""


@dataclass(frozen=True)
class Step:
    """A command; over the simulated driver, where it has a schedule."""

    command: tuple[str, ...]
    schedule: str | None = None

    @property
    def whole(self) -> tuple[str, ...]:
        """What is started."""
        if self.schedule is None:
            return self.command
        return (PYTHON, "-m", "npusim", "--schedule", self.schedule, "--", *self.command)

    @property
    def shown(self) -> str:
        """As somebody would type it."""
        return shlex.join("python" if word == PYTHON else word for word in self.whole)


def quick(tests: Sequence[str]) -> tuple[Step, ...]:
    """On every commit."""
    return (
        Step((PYTHON, "-m", "npusim.build")),
        Step((*SUITE, "--ranks", "4", "--cases", "3"), "lazy"),
        Step((*SUITE, "--ranks", "4", "--cases", "1"), "eager"),
        Step((*SUITE, "--ranks", "4", "--cases", "1"), "delay"),
        Step((*SUITE, "--cases", "10", *STEER, "--only", *STEERED), "explore"),
        Step((PYTHON, "-m", "npusim.selftest.races", "--schedules", "lazy")),
        Step((*TRIAL, "--rank-runs", "1", "--healthy", "0"), "lazy"),
        Step((*NCCL, "--cases", "3"), "lazy"),
        Step((*NCCL, "--cases", "1"), "delay"),
        Step((*TRIAL, "--of", "nccl", "--rank-runs", "1", "--healthy", "0"), "lazy"),
        Step((PYTHON, "tests/devices/conformance/serve.py", "4"), "eager"),
        Step((PYTHON, "-m", "pytest", "-m", "npusim", *TESTS, *tests), "lazy"),
    )


def deep(tests: Sequence[str]) -> tuple[Step, ...]:
    """Now and then."""
    return (
        Step((PYTHON, "-m", "npusim.build")),
        *(Step((*SUITE, "--ranks", "4"), schedule) for schedule in ("eager", "delay", "lazy")),
        Step((*SUITE, *STEER), "explore"),
        Step(TRIAL, "lazy"),
        *(Step(NCCL, schedule) for schedule in ("eager", "delay", "lazy", "explore")),
        Step((*TRIAL, "--of", "nccl"), "lazy"),
        *(Step((*RUN, "--ranks", ranks, "--out", f"build/run-{ranks}"), "eager") for ranks in "24"),
        Step((PYTHON, "-m", "pytest", "-m", "npusim", "--timeout", "1800", *tests), "lazy"),
    )


def perform(steps: Iterable[Step], longest: float = LONGEST) -> int:
    """Run them; the exit code of the first that fails, else 0."""
    for step in steps:
        print(f"\n$ {step.shown}", flush=True)
        began = time.monotonic()
        code = run_bounded(step.whole, longest)
        print(f"exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
        if code:
            return code
    return 0


def run_bounded(command: Sequence[str], longest: float) -> int:
    """The exit code of a command; 124 where it took too long, and was ended with all it started."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(longest)
        except subprocess.TimeoutExpired:
            print(f"not done after {longest:.0f} s", flush=True)
            # With PYTHONFAULTHANDLER every process prints where its threads are.
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(GRACE)
            os.killpg(process.pid, signal.SIGKILL)
            return TIMED_OUT
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        find_torch()
    except Refused as refusal:
        print(f"  npusim: SKIP ({refusal})")
        return 0
    rest = [word for word in given if word != "--deep"]
    if "--deep" in given:
        return perform(deep(rest), LONGEST_DEEP)
    return perform(quick(rest))


if __name__ == "__main__":
    sys.exit(main())
