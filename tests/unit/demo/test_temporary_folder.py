"""Folders that are gone after their block, whatever ends it."""

import tempfile
from pathlib import Path

import pytest

from equipoise.cli.process import TerminatedBySignal
from equipoise.demo.temporary_folder import temporary_folder

SIGTERM = 15


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_temporary_folder_is_private_and_removed_with_contents(parent: Path) -> None:
    with temporary_folder() as folder:
        assert [folder] == list(parent.iterdir())
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "record.npz").write_bytes(b"1")
    assert list(parent.iterdir()) == []


def test_temporary_folder_is_removed_after_signal_while_it_is_made(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def mkdir_then_signal(folder: Path, mode: int) -> None:
        mkdir(folder, mode)
        raise TerminatedBySignal(SIGTERM)

    monkeypatch.setattr(Path, "mkdir", mkdir_then_signal)
    with pytest.raises(TerminatedBySignal), temporary_folder():
        pass
    assert list(parent.iterdir()) == []
