"""The build: on demand, by one process at a time, and loud when it fails."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import npusim
import pytest
from devices.simulator.simulated_program import LIMIT
from npusim.build import ensure

SOURCES = Path(npusim.__file__).parent


def copy_sources(root: Path) -> Path:
    """The simulator without its C++, so that little is compiled.

    As deep in `root` as in a checkout: it is built at the top of that, and nobody else's.
    """
    to = root / "tests" / "simulators"
    shutil.copytree(SOURCES, to / "npusim", ignore=shutil.ignore_patterns("src", "__py*"))
    for header in ("errors.h", "fault.h"):
        (to / "npusim" / "src" / "core").mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCES / "src" / "core" / header, to / "npusim" / "src" / "core")
    return to / "npusim"


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build that copy."""
    return subprocess.run(
        [sys.executable, "-m", "npusim.build"],
        env=_environment(folder) | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def _environment(folder: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("NPUSIM_BUILD", "CXX")}
    return {**inherited, "PYTHONPATH": str(folder.parent)}


@pytest.mark.deep
def test_build_fails_when_torch_npu_needs_other_functions(tmp_path: Path) -> None:
    folder = copy_sources(tmp_path)
    listing = (folder / "symbols.txt").read_text(encoding="utf-8")
    changed = listing.replace("aclInit\n", "aclInitialise\n")
    (folder / "symbols.txt").write_text(changed, encoding="utf-8")
    completed = build(folder)
    assert completed.returncode == 2
    assert "added:   aclInit\n" in completed.stderr
    assert "removed: aclInitialise\n" in completed.stderr
    assert "--update" in completed.stderr


@pytest.mark.deep
def test_build_shows_compiler_errors_in_full(tmp_path: Path) -> None:
    folder = copy_sources(tmp_path)
    (folder / "src" / "core" / "broken.cpp").write_text("int broken() { return nothing; }\n")
    completed = build(folder)
    assert completed.returncode == 2
    assert completed.stdout == ""
    assert "src/core/broken.cpp:1:" in completed.stderr
    assert "nothing" in completed.stderr


def test_build_without_compiler_is_refused_in_one_line(tmp_path: Path) -> None:
    completed = build(copy_sources(tmp_path), CXX="/no/such/compiler")
    assert completed.returncode == 2
    assert completed.stderr.splitlines() == [
        "npusim: no C++ compiler is installed: install g++, or name one in CXX"
    ]


@pytest.mark.deep
def test_build_with_another_compiler_starts_over_and_checks_output(tmp_path: Path) -> None:
    folder = copy_sources(tmp_path)
    shutil.copy(SOURCES / "src" / "core" / "fault.cpp", folder / "src" / "core")  # stubs call it
    completed = build(folder, CXX="env g++")
    assert completed.returncode == 0, completed.stderr
    assert (Path(completed.stdout.strip()) / "lib64" / "libascendcl.so").exists()
    completed = build(folder, CXX="/bin/true")
    assert completed.returncode == 2
    assert completed.stderr.splitlines() == [
        "npusim: /bin/true made no libascendcl.so: is it a C++ compiler?"
    ]


@pytest.mark.deep
def test_build_interrupted_ends_in_one_line(tmp_path: Path) -> None:
    folder = copy_sources(tmp_path)
    compiler, marker = tmp_path / "compiler", tmp_path / "begun"
    compiler.write_text(f"#!/bin/sh\ntouch {marker}\nexec sleep 60\n")
    compiler.chmod(0o700)
    building = subprocess.Popen(
        [sys.executable, "-m", "npusim", "--schedule", "eager", "--", "true"],
        env=_environment(folder) | {"CXX": str(compiler)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    expiry = time.monotonic() + LIMIT
    while not marker.exists() and time.monotonic() < expiry:
        time.sleep(0.02)
    os.killpg(building.pid, signal.SIGINT)  # as a terminal does
    messages = building.communicate(timeout=LIMIT)[1]
    assert building.returncode == 130
    assert messages.splitlines() == ["npusim: interrupted"]


@pytest.mark.deep
def test_build_serves_concurrent_callers() -> None:
    command = [sys.executable, "-m", "npusim.build"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = [process.communicate(timeout=LIMIT)[0].strip() for process in running]
    assert folders == [str(ensure())] * 3
