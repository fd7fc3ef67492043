"""Commands that write no page do not pay for what renders one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

BLOCKED = """
import sys
sys.modules["jinja2"] = sys.modules["matplotlib"] = None
from equipoise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
IMPORTING = """
import sys
from importlib import import_module
from pkgutil import walk_packages
sys.modules["jinja2"] = sys.modules["matplotlib"] = None
import equipoise.cli.run
import equipoise.report
for module in walk_packages(equipoise.report.__path__, "equipoise.report."):
    import_module(module.name)
    print(module.name)
"""
COMMANDS = {
    "report": ("report", "counts.npy", "--ranks", "4"),
    "plan": ("plan", "counts.npy", "--ranks", "4", "--slots", "12", "-o", "new.json"),
    "advise": ("advise", "counts.npy", "--ranks", "4"),
    "replay": ("replay", "counts.npy", "--ranks", "4", "--engine", "equipoise"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_command_without_page_imports_no_template_engine(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    np.save(tmp_path / "counts.npy", np.arange(48, dtype=np.int64).reshape(2, 3, 8) ** 2)
    completed = subprocess.run(
        [sys.executable, "-c", BLOCKED, *command],
        capture_output=True, text=True, timeout=120.0, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (completed.returncode, completed.stderr.count("Traceback")) == (0, 0), completed.stderr


def test_modules_of_pages_import_no_template_engine() -> None:
    """Commands import some of them before they know whether a page is asked for."""
    completed = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    pages = {"conformance", "placement.html", "proxy_log.html", "replay.html", "run.html"}
    assert {f"equipoise.report.{page}" for page in pages} <= set(completed.stdout.split())
