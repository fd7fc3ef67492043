"""A backend in a package of its own is found by its entry point, and keeps the contract."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.tiers import DEEP

pytestmark = pytest.mark.timeout(900)

PACKAGE = ROOT / "examples" / "third_party_backend"
WATCHDOG = 800.0
FAMILIES = () if DEEP else ("--only", "ordering", "resources", "shapes")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package is installed, and nothing else has changed."""
    folder = tmp_path_factory.mktemp("installed")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    call([sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(folder),
          str(copy_of_package(tmp_path_factory))], dict(os.environ))  # fmt: skip
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def copy_of_package(factory: pytest.TempPathFactory) -> Path:
    """Its sources elsewhere: a build leaves files beside them."""
    target = factory.mktemp("source")
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            place = target / path.relative_to(PACKAGE)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return target


def call(command: list[str], environment: dict[str, str]) -> str:
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WATCHDOG, check=False
    )
    assert completed.returncode == 0, f"{completed.stdout}\n{completed.stderr}"
    return completed.stdout


def test_third_party_backend_is_found_by_entry_point(installed: dict[str, str]) -> None:
    text = call([sys.executable, "-m", "equipoise", "doctor"], installed)
    assert "inline" in text
    assert "works: the calling thread" in text


def test_third_party_backend_keeps_contract(installed: dict[str, str]) -> None:
    ours = [sys.executable, "-m", "equipoise", "conformance", "--quiet"]
    text = call([*ours, "--backend", "inline", "--ranks", "2", *FAMILIES], installed)
    assert "contract is kept: " in text.splitlines()[-1]
    assert "unsupported" in text
