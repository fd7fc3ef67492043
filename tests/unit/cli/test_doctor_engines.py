"""`equipoise doctor` for serving engines."""

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from equipoise.cli import engines
from equipoise.cli.parser import read_request


def well() -> Iterator[tuple[str, bool, str]]:
    yield "version", True, "1.0, which was tested"


def badly() -> Iterator[tuple[str, bool, str]]:
    yield "hooks", False, "engine.place:call is missing"


def partly() -> Iterator[tuple[str, bool | None, str]]:
    yield "hooks", True, "all there"
    yield "shelves", None, "it has no place for them"


@pytest.fixture
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are well, and not, and whose integration does not import."""
    where = {"abacus": f"{__name__}:well", "ruler": f"{__name__}:badly", "gone": "no_such:thing"}
    where["tape"] = f"{__name__}:partly"
    points = EntryPoints(EntryPoint(name, of, engines.GROUP) for name, of in where.items())
    monkeypatch.setattr(engines, "entry_points", points.select)


def doctor(*words: str) -> int:
    command, request = read_request(["doctor", *words])
    assert command is not None
    return command.run(request, "equipoise doctor")


@pytest.mark.usefixtures("_two")
def test_doctor_passes_compatible_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--abacus") == 0
    out = capsys.readouterr().out
    assert "abacus" in out
    assert "1.0, which was tested" in out
    assert out.splitlines()[-1] == "every part can be switched on"


@pytest.mark.usefixtures("_two")
def test_doctor_fails_engine_with_missing_hook(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "found.json"
    assert doctor("--ruler", "--abacus", "--json", str(report)) == 1
    out = capsys.readouterr().out
    assert "MISSING: engine.place:call is missing" in out
    assert json.loads(report.read_text())["ruler"] == [
        {"name": "hooks", "passed": False, "detail": "engine.place:call is missing"}
    ]


@pytest.mark.usefixtures("_two")
def test_doctor_passes_engine_with_unsupported_optional_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "found.json"
    assert doctor("--tape", "--json", str(report)) == 0
    out = capsys.readouterr().out
    assert "not to be had: it has no place for them" in out
    assert out.splitlines()[-1] == "every part that can be had can be switched on"
    assert [each["passed"] for each in json.loads(report.read_text())["tape"]] == [True, None]


@pytest.mark.usefixtures("_two")
def test_doctor_reports_integration_import_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor("--gone") == 1
    assert "cannot be looked at: No module" in " ".join(capsys.readouterr().out.split())
