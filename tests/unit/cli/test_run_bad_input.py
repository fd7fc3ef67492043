"""Bad input: one line on standard error, exit code 2, nothing started, nothing written."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.ports import free_port

from equipoise.cli.files import probe_file, probe_folder

BAD = {
    "no rank": (("--ranks", "0"), "--ranks must be 1 to 64, got 0"),
    "negative ranks": (("--ranks", "-2"), "--ranks must be 1 to 64, got -2"),
    "a lock where a step waits for its device": (
        ("--backend", "helpers.fakes.forgetful_backend:FORGETFUL", "--commit", "in_place"),
        "--commit in_place is for --backend cpu here, not helpers.fakes.forgetful_backend",
    ),
    "too few devices": (
        ("--backend", "helpers.fakes.two_device_backend:BACKEND"),
        "--ranks 4: 4 ranks need 4 devices, and crowded has 2 here: links takes one rank a device",
    ),
    "ranks that do not divide the experts": (("--ranks", "5", "--slots", "40"), "does not divide"),
    "a word for a number": (("--ranks", "four"), "expected a whole number, got 'four'"),
    "fewer slots than experts": (("--slots", "28"), "--slots must be 32 to 4096, got 28"),
    "slots not divisible by ranks": (("--slots", "42"), "not divisible by --ranks 4"),
    "too few redundant experts": (
        ("--num-redundant-experts", "-4"),
        "--num-redundant-experts must be 0 to 4064, got -4",
    ),
    "two slot counts": (("--slots", "40", "--num-redundant-experts", "8"), "gives both"),
    "no step": (("--steps", "0"), "--steps must be 1 to 100000, got 0"),
    "steps within the window": (("--steps", "4"), "no step is left after a load window of 4"),
    "fewer steps than texts": (
        ("--steps", "2", "--variants", "unbalanced"),
        "fewer than the 3 texts",
    ),
    "no window": (("--window-size", "0"), "--window-size must be 1 to 100000, got 0"),
    "a window longer than the interval": (("--window-size", "9"), "longer than --step-interval 8"),
    "an unknown backend": (("--backend", "abacus"), "unknown name 'abacus'; known: "),
    "mpi without mpiexec": (
        ("--communicator", "mpi", "--ranks", "2"),
        "mpiexec -n 2 equipoise run --communicator mpi",
    ),
    "an unknown communicator": (("--communicator", "pigeon"), "known: gloo"),
    "unknown shares": (
        ("--shares", "fair"),
        "expected static or lagged or local or node or exact, got 'fair'",
    ),
    "stages that do not divide the ranks": (
        ("--pipeline-ranks", "3"),
        "--ranks 4 cannot be divided into 3 stages",
    ),
    "more stages than layers": (
        ("--ranks", "8", "--pipeline-ranks", "8"),
        "--pipeline-ranks must be 1 to 6, got 8",
    ),
    "no stage": (("--pipeline-ranks", "0"), "--pipeline-ranks must be 1 to 6, got 0"),
    "slices that do not divide a stage": (
        ("--pipeline-ranks", "2", "--tensor-ranks", "4"),
        "--tensor-ranks 4 does not divide the 2 rank(s) of a stage",
    ),
    "no micro-batches": (("--micro-batches", "0"), "--micro-batches must be 1 to 16, got 0"),
    "micro-batches of one stage": (
        ("--micro-batches", "2"),
        "--micro-batches has no meaning with one stage",
    ),
    "slots not divisible by the ranks of a stage": (
        ("--pipeline-ranks", "2", "--slots", "41"),
        "not divisible by the 2 ranks of a stage",
    ),
    "too many ranks": (("--ranks", "128"), "--ranks must be 1 to 64, got 128"),
    "too many slots": (("--slots", "4100"), "--slots must be 32 to 4096, got 4100"),
    "too many steps": (("--steps", "100001"), "--steps must be 1 to 100000, got 100001"),
    "an enormous window": (
        ("--window-size", "9" * 30),
        "--window-size must be 1 to 100000, got 999999999999999999999999999999",
    ),
    "an enormous interval": (
        ("--step-interval", "100001"),
        "--step-interval must be 1 to 100000, got 100001",
    ),
    "a backend that does not exist": (("--backend", "no.such:THING"), "--backend: backend 'no.s"),
    "an object that is no backend": (("--backend", "os:path"), "'os:path' is not a Backend"),
    "a backend without a name": (("--backend", ":"), "--backend: backend ':' does not import"),
    "a backend that raises": (("--backend", "raises:X"), "RuntimeError: out of beads"),
    "an object that is no communicator": (("--communicator", "os:path"), "not a Communicator"),
    "a negative deadline": (("--deadline", "-1"), "--deadline must be 1 to 86400 seconds, got -1"),
    "a tiny deadline": (("--deadline", "0.001"), "--deadline must be 1 to 86400 seconds"),
    "a deadline of centuries": (("--deadline", "1e10"), "seconds, got 1e+10"),
    "a deadline of aeons": (("--deadline", "1e300"), "seconds, got 1e+300"),
    "a deadline that is no number": (("--deadline", "nan"), "expected a number of seconds"),
    "an endless deadline": (("--deadline", "inf"), "expected a number of seconds"),
    "no port": (("--metrics-port", "0"), "--metrics-port must be 1 to 65535, got 0"),
    "a port too high for the last rank": (
        ("--metrics-port", "65533"),
        "--metrics-port must be 1 to 65532, got 65533",
    ),
    "an interval of no step": (
        ("--log-balancedness", "--log-balancedness-interval", "0"),
        "--log-balancedness-interval must be 1 to 100000, got 0",
    ),
    "a library that is not here": (
        ("--wandb", "mine"),
        "pip install '.[wandb]' in a clone of equipoise",
    ),
    "a folder as trace": (("--trace", "."), "--trace: . is a folder, not a file"),
    "a negative seed": (("--seed", "-1"), "--seed must be at least 0"),
    "an unknown option": (("--rank", "4"), "unknown option --rank; did you mean --ranks?"),
    "a missing text": (("--text", "missing.txt"), "missing.txt"),
    "a folder as text": (("--text", "."), "directory"),
    "an empty text": (("--text", "empty.txt"), "empty"),
    "a short text": (("--text", "short.txt"), "short.txt"),
    "a NUL byte": (("--text", "nul.txt"), "NUL byte at offset 3"),
    "invalid UTF-8": (("--text", "latin.txt"), "not UTF-8 at byte offset 200"),
    "a file as folder": (("--out", "empty.txt"), "empty.txt is not a folder"),
    "a folder below a file": (("--out", "empty.txt/deeper"), "empty.txt is not a folder"),
    "a folder as JSON": (("--json", "."), "is a folder, not a file"),
    "a folder as report": (("--html", "."), "is a folder, not a file"),
    "one file for two": (("--json", "f", "--html", "./f"), "the file that --json is written to"),
    "figures over the record": (("--json", "equipoise-run/record.npz"), "--out's record.npz is"),
    "a report over the record": (("--out", "o", "--html", "o/record.npz"), "record.npz is written"),
    "a folder where the record goes": (("--out", "taken"), "taken/record.npz is a folder"),
    "a missing configuration": (("--config", "none.yaml"), "none.yaml cannot be read"),
    "an empty path": (("--out", ""), "expected a path"),
}


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "raises.py").write_text("raise RuntimeError('out of beads')")
    (tmp_path / "taken" / "record.npz").mkdir(parents=True)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"short")
    (tmp_path / "nul.txt").write_bytes(b"abc\0" + b"d" * 400)
    (tmp_path / "latin.txt").write_bytes(b"a" * 200 + b"\xe9" + b"b" * 200)


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_run_rejects_bad_input_with_one_line(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    before = sorted(os.listdir(tmp_path))
    answer = equipoise("run", *arguments)
    assert answer.code == 2
    assert answer.out == ""
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert launched_settings == []
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("arguments", [("frobnicate",), ("doctor", "--json", ".")])
def test_unknown_command_is_rejected_with_one_line(
    equipoise: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    answer = equipoise(*arguments)
    assert (answer.code, answer.out) == (2, "")
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")


def test_run_rejects_unwritable_output_folder_before_start(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Permissions do not bind the superuser, who may well run this test.
    locked_folder = tmp_path / "locked"
    locked_folder.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked_folder)
    answer = equipoise("run", "--out", str(locked_folder / "run"))
    assert answer.code == 2
    assert "locked cannot be written to" in answer.err
    assert launched_settings == []


@pytest.mark.parametrize("flag", ["--out", "--json", "--html", "--trace"])
def test_run_rejects_uncreatable_output_before_start(
    equipoise: Callable[..., Any],
    launched_settings: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
) -> None:
    """As below /proc, where the superuser may do everything, and nothing can be made."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(Path, "mkdir", refuse)
    here = {"--out": "there", "--json": "f.json", "--html": "r.html", "--trace": "t.json"}
    words = [word for pair in {**here, flag: "new/x"}.items() for word in pair]
    answer = equipoise("run", *words)
    assert (answer.code, answer.out, launched_settings) == (2, "", [])
    [line] = answer.err.splitlines()
    assert line.startswith(f"equipoise: error: {flag}")
    assert line.endswith("cannot be written: No such file or directory")
    assert os.listdir(tmp_path / "there") == []


def test_try_file_leaves_existing_files_unchanged(tmp_path: Path) -> None:
    old, link, pipe = tmp_path / "old", tmp_path / "link", tmp_path / "pipe"
    old.write_text("figures")
    link.symlink_to(tmp_path / "nowhere")
    os.mkfifo(pipe)
    before = sorted(os.listdir(tmp_path))
    for path in (old, link, pipe, tmp_path / "a" / "b" / "new", Path("/dev/full")):
        probe_file("--json", path)
    probe_folder("--out", tmp_path / "c")
    assert old.read_text() == "figures"
    assert sorted(os.listdir(tmp_path)) == before


def test_try_file_leaves_what_another_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands with the same report: one tries its file while the other finishes it."""
    report, made = tmp_path / "new" / "report.html", Path.mkdir

    def mkdir(folder: Path, *arguments: Any, **options: Any) -> None:
        made(folder, *arguments, **options)
        report.write_text("finished")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        probe_file("--out's report", report)
    assert (report.read_text(), os.listdir(report.parent)) == ("finished", ["report.html"])


def test_try_file_makes_folder_again_that_another_process_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, removals = Path.mkdir, iter([True, True, False])

    def mkdir(folder: Path, *arguments: Any, **options: Any) -> None:
        made(folder, *arguments, **options)
        if next(removals):
            folder.rmdir()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        probe_file("--json", tmp_path / "new" / "figures.json")
    assert not (tmp_path / "new").exists()


def test_run_rejects_used_metrics_port_before_start(
    equipoise: Callable[..., Any], launched_settings: list[object]
) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    first = free_port(4)
    with socket.create_server(("127.0.0.1", first + 2)):
        answer = equipoise("run", "--metrics-port", str(first))
    assert (answer.code, answer.out, launched_settings) == (2, "", [])
    assert answer.err == (
        f"equipoise: error: --metrics-port {first}: rank 2: metrics cannot be served on "
        f"127.0.0.1:{first + 2}: Address already in use\n"
    )


def test_run_rejects_foreign_metrics_address_before_start(
    equipoise: Callable[..., Any], launched_settings: list[object]
) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    first, documents = free_port(4), "192.0.2.1"
    words = ("--metrics-port", str(first), "--metrics-address", documents)
    answer = equipoise("run", *words)
    assert (answer.code, answer.out, launched_settings) == (2, "", [])
    [line] = answer.err.splitlines()
    assert line.startswith(
        f"equipoise: error: --metrics-address {documents} --metrics-port {first}: rank 0: "
    )


def test_try_folder_makes_nothing_under_external_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("tried"))
    probe_folder("--out", tmp_path / "new")


def test_run_error_hides_control_characters_of_file_name(
    equipoise: Callable[..., Any], launched_settings: list[object]
) -> None:
    answer = equipoise("run", "--text", "a\x1b[2J\nb")
    assert len(answer.err.splitlines()) == 1
    assert "a?[2J b" in answer.err


@pytest.mark.slow
def test_run_as_process_rejects_bad_input_with_one_line() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "equipoise", "run", "--ranks", "0"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = "equipoise: error: --ranks must be 1 to 64, got 0\n"
    assert (completed.returncode, completed.stdout, completed.stderr) == (2, "", expected)
