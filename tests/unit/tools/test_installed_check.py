"""Tests of an installed package that is older than the tree are refused."""

import os
import time
from pathlib import Path

import check_installed
import pytest


@pytest.fixture
def installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that is as the tree is; one folder of the tree is a link."""
    tree = tmp_path / "tree"
    for folder in (
        tree / "src" / "equipoise",
        tree / "hal",
        tree / "csrc" / "planning",
        tmp_path / "setup/hal",
    ):
        folder.mkdir(parents=True)
    (tree / "src" / "equipoise" / "hal").symlink_to(tree / "hal")
    copy = tmp_path / "setup"
    for path in (tree / "hal" / "work.py", copy / "hal" / "work.py"):
        path.write_text("DEADLINE = 1\n")
    (tree / "csrc" / "planning" / "greedy.cpp").write_text("int plan();\n")
    (copy / "_native.so").write_text("")
    monkeypatch.setattr(check_installed, "ROOT", tree)
    monkeypatch.setattr(check_installed, "PACKAGE", tree / "src" / "equipoise")
    return copy


def test_installed_copy_of_tree_is_accepted(installed_copy: Path) -> None:
    assert list(check_installed.differences(installed_copy)) == []


def test_installed_copy_differs_when_module_or_source_changed(installed_copy: Path) -> None:
    tree = check_installed.ROOT
    (tree / "hal" / "work.py").write_text("DEADLINE = 2\n")
    (tree / "hal" / "new.py").write_text("")
    (installed_copy / "hal" / "gone.py").write_text("")
    later = time.time() + 10
    os.utime(tree / "csrc" / "planning" / "greedy.cpp", (later, later))
    differences = list(check_installed.differences(installed_copy))
    assert differences == ["hal/gone.py", "hal/new.py", "hal/work.py", "csrc/planning/greedy.cpp"]
