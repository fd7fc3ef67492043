"""`equipoise conformance`: what it prints, writes, refuses, and ends with."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.fakes import schedule_recorder as wheel

from equipoise.cli.config import read_config
from equipoise.cli.conformance_options import (
    COMMAND,
    ConformanceRequest,
    resolve_conformance_request,
)
from equipoise.cli.import_errors import explain_import_error
from equipoise.hal.conformance.clauses import COMMUNICATOR_FAMILIES, FAMILIES
from equipoise.hal.conformance.profile import Profile, RunTarget
from equipoise.hal.conformance.reproduce import MARK

BROKEN_BACKEND = "helpers.fakes.broken_stream_backends:BACKEND"
BAD = {
    ("--backend", "nothing"): "--backend: unknown name 'nothing'; known: ",
    ("--backend", "no.such.module:BACKEND"): "does not import",
    ("--backend", "json:loads"): "is not a Backend",
    ("--communicator", "pigeons"): "--communicator: unknown name 'pigeons'",
    ("--communicator", "c10d"): "(or PACKAGE:OBJECT or c10d:NAME or torchcomms:NAME)",
    ("--backend", "c10d:gloo"): "--backend: 'c10d:gloo' is a communicator, not a backend",
    ("--communicator", "c10d:gloo", "--only", "locks"): "no property of the families locks and",
    ("--out", "/proc/found"): "--out: /proc/found cannot be written",
    ("--ranks", "0"): "--ranks must be 1 to 64, got 0",
    ("--ranks", "65"): "--ranks must be 1 to 64, got 65",
    ("--backend", "virtual", "--ranks", "2"): "--ranks has no meaning on virtual",
    ("--ranks", "many"): "expected a whole number, got 'many'",
    (
        "--backend",
        "helpers.fakes.two_device_backend:BACKEND",
    ): "--ranks 4: 4 ranks need 4 devices, and crowded has 2",
    ("--seed", "-1"): "--seed must be at least 0, got -1",
    ("--cases", "0"): "--cases must be 1 to 1000000, got 0",
    ("--schedule-from", "wheel"): "--schedule-from: 'wheel' is not PACKAGE:OBJECT",
    ("--schedule-from", "no.such:wheel"): "--schedule-from: 'no.such:wheel' does not import",
    (
        "--backend",
        "virtual",
        "--schedule-from",
        "json:loads",
    ): "every schedule of virtual is chosen",
    ("--profile", "night"): "expected ci or deep, got 'night'",
    ("--only", "colours"): "expected a family (ordering, locks",
    ("--level", "steam"): "expected a level (core, fault, stream, elastic), got 'steam'",
    ("--xfail", "missing.toml"): "--xfail: missing.toml cannot be read: No such file",
    ("--xfail", "/dev/null", "--level", "core", "--ranks", "0"): "--ranks must be 1 to 64",
    ("--only",): "--only needs a value: see equipoise conformance --help",
    ("--json", "."): "--json: . is a folder",
    ("--out", "/dev/null"): "--out: /dev/null is not a folder",
    ("--html", "/dev/null/x.html"): "--html: ",
    (
        "--json",
        "a.json",
        "--html",
        "a.json",
    ): "--html: a.json is the file that --json is written to",
    ("--expert-parallel", "pigeons"): "--expert-parallel: unknown name 'pigeons'; known: ",
    ("--expert-parallel", "json:loads"): "expert-parallel library 'json:loads' is not an",
    (
        "--expert-parallel",
        "helpers.fakes.fake_expert_libraries:NORMAL",
        "--only",
        "shapes",
    ): "--expert-parallel judges a library on ranks: leave out --only",
    ("--config", "missing.yaml"): "missing.yaml cannot be read",
}


@pytest.mark.parametrize(("arguments", "message"), BAD.items(), ids=lambda v: " ".join(v)[:40])
def test_conformance_rejects_bad_input_with_one_line(
    equipoise: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    answer = equipoise("conformance", *arguments)
    assert answer.code == 2
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert answer.out == ""


@pytest.mark.slow
def test_conformance_exits_0_when_contract_is_kept(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise("conformance", "--backend", "virtual", "--only", "ordering", "--quiet")
    assert answer.code == 0, answer.out
    lines = answer.out.splitlines()
    assert lines[0].startswith("conformance of virtual with virtual")
    assert any(line.startswith("O1   held") for line in lines)
    assert lines[-1].startswith("this part of the contract is kept: ")
    assert answer.err == ""


@pytest.mark.slow
def test_conformance_prints_violating_program_and_exits_1(
    equipoise: Callable[..., Any],
) -> None:
    answer = equipoise("conformance", "--backend", BROKEN_BACKEND, "--only", "ordering", "--quiet")
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert any(line.startswith("O3   violated") for line in lines)
    assert any("wait(" in line for line in lines)
    assert lines[-1].startswith("THE CONTRACT IS BROKEN: ")


@pytest.mark.slow
def test_conformance_writes_json_and_html_report(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    programs = tmp_path / "found" / "violations"
    programs.mkdir(parents=True)
    (programs / "earlier.py").write_text(f"{MARK}\n)\n")
    (programs / "mine.py").write_text("mine\n")
    answer = equipoise(
        "conformance", "--backend", BROKEN_BACKEND, "--only", "ordering", "--out", "found"
    )
    assert answer.code == 1
    assert not (programs / "earlier.py").exists(), "a program of an earlier run"
    assert (programs / "mine.py").exists()
    report = json.loads((tmp_path / "found" / "conformance.json").read_text())
    assert report["exit_code"] == 1
    assert report["clauses"]["O3"]["status"] == "violated"
    [violation] = [
        property_result
        for property_result in report["properties"]
        if property_result["status"] == "violated"
    ]
    assert violation["program"]
    page = (tmp_path / "found" / "conformance.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert violation["what"].split()[0] in page
    assert "verdicts: " in answer.err
    assert "page: " in answer.err
    path = Path("found", "violations", f"{violation['property']}.py")
    assert f"run it: python {path}" in answer.out
    assert violation["program"][-1] in (tmp_path / path).read_text()


def test_conformance_command_line_overrides_file_and_defaults(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("backend: virtual\nprofile: deep\nonly: [locks, ordering]\nout: found\n")
    file_options = read_config(file, COMMAND.options)
    request = resolve_conformance_request(
        {"profile": Profile.CI, "json": Path("x.json")}, file_options
    )
    assert request == ConformanceRequest(
        backend="virtual",
        profile=Profile.CI,
        only=("locks", "ordering"),
        json=Path("x.json"),
        html=Path("found/conformance.html"),
        out=Path("found"),
    )


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, RunTarget.BACKEND),
        ({"backend": "cpu"}, RunTarget.BACKEND),
        ({"communicator": "gloo"}, RunTarget.COMMUNICATOR),
        ({"communicator": "gloo", "backend": "cpu"}, RunTarget.BACKEND),
        ({"communicator": "gloo", "schedule_from": "a:b"}, RunTarget.BACKEND),
    ],
)
def test_conformance_judges_communicator_alone_when_no_backend_is_named(
    options: dict[str, str], target: RunTarget
) -> None:
    assert resolve_conformance_request(options, {}).target is target
    assert resolve_conformance_request({}, options).target is target
    families = COMMUNICATOR_FAMILIES if target is RunTarget.COMMUNICATOR else FAMILIES
    assert resolve_conformance_request(options, {}).only == families
    chosen = {**options, "only": ("control",)}
    assert resolve_conformance_request(chosen, {}).only == ("control",)


def test_conformance_names_file_of_bad_expectation(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "known.toml").write_text('[[expected]]\nclause = "K5"\n')
    answer = equipoise("conformance", "--xfail", "known.toml")
    assert answer.code == 2
    message = "--xfail: known.toml: [[expected]] number 1: K5: no reason is given"
    assert answer.err == f"equipoise: error: {message}\n"


def test_conformance_reads_known_violations_with_mark_of_encoding(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    known = '[[expected]]\nclause = "V1"\nreason = "r"\n'
    (tmp_path / "known.toml").write_text(known, encoding="utf-8-sig")
    arguments = ("--backend", "virtual", "--only", "determinism", "--cases", "1", "--quiet")
    assert equipoise("conformance", *arguments, "--xfail", "known.toml").code == 0


def test_conformance_finds_backend_in_working_directory(
    equipoise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script, which is what runs the command, does not look there by itself."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "from equipoise.backends.virtual import BACKEND\n"
    (tmp_path / "backend_of_this_folder.py").write_text(source)
    arguments = ("--only", "determinism", "--cases", "1", "--quiet")
    answer = equipoise("conformance", "--backend", "backend_of_this_folder:BACKEND", *arguments)
    assert answer.code == 0, answer.err


@pytest.mark.slow
def test_conformance_exits_0_when_violations_are_expected(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    known = '[[expected]]\nclause = "O3"\nreason = "ignored"\n'
    (tmp_path / "known.toml").write_text(known)
    arguments = ("--backend", BROKEN_BACKEND, "--only", "ordering", "--level", "stream", "--quiet")
    answer = equipoise("conformance", *arguments, "--xfail", "known.toml")
    assert answer.code == 0, answer.out
    assert any(line.startswith("O3   expected") for line in answer.out.splitlines())
    (tmp_path / "known.toml").write_text(known.replace("O3", "O1"))
    answer = equipoise("conformance", *arguments, "--xfail", "known.toml")
    assert answer.code == 1
    assert "O1 is expected to be violated and is held" in answer.out


@pytest.mark.parametrize(("other", "code"), [("0.2.0", 2), ("0.1.0", 0)])
def test_conformance_refuses_two_versions_of_its_modules(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, other: str, code: int
) -> None:
    versions = {"equipoise": "0.1.0", "equipoise-conformance": other}
    monkeypatch.setattr("equipoise.cli.conformance.version", versions.__getitem__)
    arguments = ("--backend", "virtual", "--only", "determinism", "--cases", "1", "--quiet")
    answer = equipoise("conformance", *arguments)
    assert answer.code == code
    if code:
        [line] = answer.err.splitlines()
        assert "equipoise 0.1.0 and equipoise-conformance 0.2.0 are both installed" in line


@pytest.mark.slow
def test_conformance_reports_raising_probe_as_violation(equipoise: Callable[..., Any]) -> None:
    loud = "helpers.fakes.broken_stream_backends:LOUD"
    answer = equipoise("conformance", "--backend", loud, "--only", "resources", "--quiet")
    assert answer.code == 1
    assert any(line.startswith("B1   violated") for line in answer.out.splitlines())
    assert answer.err == ""


def test_conformance_steers_device_before_each_case(
    equipoise: Callable[..., Any], tmp_path: Path
) -> None:
    wheel.TOLD.clear()
    figures = tmp_path / "figures.json"
    arguments = ("--backend", "cpu", "--only", "ordering", "--cases", "3", "--quiet")
    output = ("--json", str(figures))
    answer = equipoise(
        "conformance",
        *arguments,
        *output,
        "--schedule-from",
        "helpers.fakes.schedule_recorder:steer",
    )
    assert answer.code == 0, answer.out + answer.err
    assert answer.out.splitlines()[0].startswith("conformance of cpu with gloo")
    properties = json.loads(figures.read_text())["properties"]
    assert len(properties) > 5
    assert len(wheel.TOLD) == sum(each["cases"] for each in properties), "and nothing on ranks"


def test_conformance_failed_steering_exits_2_with_one_line(
    equipoise: Callable[..., Any],
) -> None:
    arguments = ("--backend", "cpu", "--only", "overlap", "--quiet")
    answer = equipoise(
        "conformance", *arguments, "--schedule-from", "helpers.fakes.schedule_recorder:into_nothing"
    )
    assert answer.code == 2
    [line] = answer.err.splitlines()
    assert "cannot steer: OSError: the driver is not there" in line


def test_conformance_without_hypothesis_names_command_that_installs_it() -> None:
    missing = ModuleNotFoundError("No module named 'hypothesis'", name="hypothesis")
    assert explain_import_error(missing) == (
        "hypothesis is missing: pip install '.[conformance]' in a clone of equipoise"
    )
