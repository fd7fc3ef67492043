"""What a user names as a file is read within bounds, whatever it leads to."""

import os
import threading
from pathlib import Path

import pytest

from equipoise import input_files
from equipoise.input_files import read_input


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("content", [b"", b"text", b"x" * 3_000_000])
def test_file_is_read_whole(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_input(tmp_path / "file") == content


def test_pipe_is_read_to_its_end(pipe: Path) -> None:
    content = b"y" * 300_000  # more than a pipe holds at once
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    assert read_input(pipe) == content
    writer.join(60.0)


def test_pipe_without_writer_is_refused(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "TIMEOUT", 0.01)
    with pytest.raises(OSError, match="a pipe into which nobody writes"):
        read_input(pipe)


def test_endless_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "MAX_BYTES", 5_000_000)
    with pytest.raises(OSError, match="File too large"):
        read_input(Path("/dev/zero"))


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_input(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        read_input(tmp_path)
