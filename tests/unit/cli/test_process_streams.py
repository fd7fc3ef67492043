"""Outputs that are closed, full, or that nobody reads."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli import files, process
from equipoise.cli.files import write_file
from equipoise.demo.settings import RunSettings
from equipoise.hal.errors import EquipoiseError

pytestmark = pytest.mark.slow

# What argparse cannot write at once, it forgets; Python holds it back unless told otherwise.
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}
OUTPUT_FILES = ["record.npz", "report.html", "summary.json"]


class BrokenStream:
    """A stream whose other end is gone, or full."""

    def __init__(self, error: OSError, descriptor: int) -> None:
        self._error = error
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        raise self._error

    def flush(self) -> None:
        raise self._error

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (OSError(28, "No space left on device"), 3, "standard output: No space left on device"),
    ],
)
def test_run_keeps_files_when_table_cannot_be_printed(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: OSError,
    code: int,
    message: str,
) -> None:
    spare = os.open(tmp_path / "spare", os.O_CREAT | os.O_WRONLY)
    monkeypatch.setattr(sys, "stdout", BrokenStream(error, spare))
    answer = equipoise("run", "--quiet")
    assert os.fstat(spare).st_rdev == os.stat(os.devnull).st_rdev
    os.close(spare)
    assert answer.code == code
    assert message in answer.err
    assert len(answer.err.splitlines()) == bool(message)
    assert sorted(os.listdir(tmp_path / "equipoise-run")) == OUTPUT_FILES


def test_run_succeeds_with_closed_stdout_and_stderr(
    equipoise: Callable[..., Any],
    launched_settings: list[RunSettings],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert equipoise("run").code == 0
    for stream in (sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        stream.close()
    assert sorted(os.listdir(tmp_path / "equipoise-run")) == OUTPUT_FILES


def test_streams_tell_ignores_broken_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    monkeypatch.setattr(sys, "stderr", BrokenStream(BrokenPipeError(32, "Broken pipe"), theirs))
    process.print_stderr("interrupted")
    assert os.fstat(theirs).st_rdev == os.stat(os.devnull).st_rdev
    os.close(ours)
    os.close(theirs)


def test_write_file_keeps_old_file_when_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(EquipoiseError, match=r"link\.html cannot be written: No space left"):
            write_file(link, "new" * 1000)
    assert (page.read_text(), sorted(os.listdir(tmp_path))) == ("old", ["link.html", "page.html"])
    assert write_file(link, "new") == str(link)
    assert (page.read_text(), page.stat().st_mode & 0o777, link.is_symlink()) == (
        "new",
        0o640,
        True,
    )
    assert write_file(tmp_path / "a" / "b.json", "{}").endswith("b.json, in a new folder")


def test_write_file_writes_into_device_and_pipe(tmp_path: Path) -> None:
    write_file(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_write_file_gives_up_on_pipe_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(files, "PIPE_TIMEOUT", 0)
    with pytest.raises(EquipoiseError, match="pipe cannot be written: nobody reads it for 0 s"):
        write_file(pipe, "lost")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(EquipoiseError, match="its reader took nothing for 0 s"):
            write_file(pipe, "more than it holds" * 100_000)
    finally:
        os.close(reader)


def test_write_file_below_dev_keeps_old_file_when_disk_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="equipoise-test-") as folder:
        page = Path(folder, "page.html")
        page.write_text("old")
        monkeypatch.setattr(os, "fsync", lambda _: os.write(-1, b""))
        with pytest.raises(EquipoiseError, match=r"page\.html cannot be written"):
            write_file(page, "new" * 1000)
        assert (page.read_text(), os.listdir(folder)) == ("old", ["page.html"])


@pytest.mark.parametrize("opened", [">", ">>"])
def test_write_file_to_stdout_goes_behind_what_was_printed(tmp_path: Path, opened: str) -> None:
    program = (
        "from pathlib import Path; from equipoise.cli.files import write_file; "
        "print('table'); write_file(Path('/dev/stdout'), 'figures')"
    )
    subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "$1" {opened} out', sys.executable, program],
        cwd=tmp_path, env=BUFFERED, timeout=240, check=True,
    )  # fmt: skip
    assert (tmp_path / "out").read_text() == "table\nfigures"


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        ("--help >&-", 0, ""),
        ("--help > /dev/full", 3, "equipoise: error: standard output: No space left on device"),
        (
            "plan --help > /dev/full",
            3,
            "equipoise: error: standard output: No space left on device",
        ),
        ("run --ranks 0 2>&-", 2, ""),
        ("run --ranks 0 2> /dev/full", 2, ""),
    ],
)
def test_program_ends_without_traceback_on_unusable_outputs(
    shell: str, code: int, message: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    completed = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m equipoise {shell}', sys.executable],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=BUFFERED,
    )
    assert completed.returncode == code
    assert len(completed.stderr.splitlines()) == bool(message)
    assert message in completed.stderr


def test_full_output_of_help_is_noticed_without_buffering() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    with Path("/dev/full").open("w") as full:
        completed = subprocess.run(
            [sys.executable, "-u", "-m", "equipoise", "--help"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert completed.returncode == 3
    assert completed.stderr.startswith("equipoise: error: standard output: No space left")


def test_program_ends_silently_when_stdout_reader_closed() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    completed = subprocess.run(
        [sys.executable, "-m", "equipoise", "--help"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=240,
        check=False,
        env=BUFFERED,
    )
    os.close(theirs)
    assert (completed.returncode, completed.stderr) == (1, b"")
