"""`equipoise run` as a process, and the ranks that it has started."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import SEARCH_PATH

from equipoise.cli.main import main


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """A command in this process, which has imported torch already; what its ranks print, too.

    Returns exit code, output and error output.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SEARCH_PATH)
        code = main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=800)
    return process.returncode, out, err


def workers(parent: int) -> list[int]:
    """The rank processes that `parent` has started, in order of rank."""
    pids = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            family = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"equipoise.demo.worker" in words and int(family[1]) == parent:
            rank = next(item for item in environment if item.startswith(b"RANK="))
            pids[int(rank[5:])] = int(entry.name)
    return [pids[rank] for rank in sorted(pids)]


def wait_for_service(process: subprocess.Popen[str], ranks: int) -> list[int]:
    """Wait until the first lines of progress: all ranks serve."""
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    progress = (line for line in lines if re.search(r"\d/\d+ steps", line))
    assert next(progress, None), "it ended before any step"
    pids = workers(process.pid)
    assert len(pids) == ranks
    return pids
