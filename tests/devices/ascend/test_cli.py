"""The commands where torch_npu is installed and finds no driver: a line, not a traceback."""

import os
import subprocess
import sys

import pytest

from equipoise.backends.ascend import BACKEND

CANN = ("LD_LIBRARY_PATH", "LD_PRELOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""What CANN's set_env.sh, or a simulated driver, sets; and what hides torch_npu from torch."""

MANY = {"conformance": ("--ranks", "32"), "run": ("--ranks", "32", "--slots", "64")}
"""More than any machine has, one hopes."""


def run_equipoise(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """What the command says to somebody who sourced nothing."""
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        env={name: value for name, value in os.environ.items() if name not in CANN},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_doctor_names_missing_cann_setup() -> None:
    answer = run_equipoise("doctor")
    assert answer.returncode == 0, answer.stderr
    assert "is CANN's set_env.sh sourced?" in " ".join(answer.stdout.split())
    assert answer.stderr == ""


@pytest.mark.parametrize("command", ["conformance", "run"])
def test_command_without_driver_fails_with_one_line(command: str) -> None:
    answer = run_equipoise(command, "--backend", "ascend")
    [line] = answer.stderr.splitlines()
    assert "ascend cannot run here: torch_npu does not import" in line
    assert answer.returncode in (2, 3)


@pytest.mark.parametrize("command", ["conformance", "run"])
def test_command_refuses_more_ranks_than_devices(command: str) -> None:
    """Clause B9."""
    most = BACKEND.devices()
    answer = subprocess.run(
        [sys.executable, "-m", "equipoise", command, "--backend", "ascend", *MANY[command]],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    [line] = answer.stderr.splitlines()
    assert f"and ascend has {most} here: hccl takes one rank a device" in line
    assert answer.returncode == 2
