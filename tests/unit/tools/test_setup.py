"""The build stops with a line that says what to do where the package's links are missing."""

import runpy
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[3] / "setup.py"
PARTS = ("hal", "backends", "balancer", "pipeline", "integrations")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages that a run of setup.py in `tmp_path` would build; empty until it runs."""
    package_names: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("setuptools.setup", lambda packages, **_: package_names.extend(packages))
    package = tmp_path / "src" / "equipoise"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for part in PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").touch()
        (package / part).symlink_to(Path("..", "..", part))
    return package_names


def test_build_finds_linked_folders(packages: list[str]) -> None:
    runpy.run_path(str(SETUP))
    assert set(packages) == {"equipoise", *(f"equipoise.{part}" for part in PARTS)}


@pytest.mark.parametrize("part", PARTS)
def test_build_stops_where_links_are_missing(
    part: str, packages: list[str], tmp_path: Path
) -> None:
    """A checkout without support for links has a file in the place of each."""
    link = tmp_path / "src" / "equipoise" / part
    link.unlink()
    link.write_text(f"../../{part}", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"core\.symlinks true"):
        runpy.run_path(str(SETUP))
    assert packages == []
