"""`equipoise run` as a user starts it: what it promises, and what it does when ranks are lost."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.ports import free_port
from support.trace_format import faults

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
CADENCE = ("--window-size", "2", "--step-interval", "2", "--quiet")
TEXT = str(files("equipoise.demo").joinpath("text", "python.txt"))
SMALL = ("--text", TEXT, "--steps", "14", *CADENCE)
"""One phase; whether two epochs fit in depends on the machine."""
SHORT = ("--text", TEXT, "--steps", "18", *CADENCE)
"""One phase; two epochs fit in wherever the tests run."""
SWITCHING = ("--steps", "54", *CADENCE)
"""Three phases of 18 steps; an epoch takes five or six."""
SUPPORT = Path(__file__).parent.parent
KEYS = """version backend ranks layers experts slots shares steps tokens phases switch_steps
imbalance_unbalanced imbalance_balanced imbalance_static imbalance_lagged noise_floor epochs
slots_moved slots_total bytes_moved stall_seconds tokens_per_second outputs_identical"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "equipoise", "run", *arguments]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def workers(parent: int) -> list[int]:
    """The rank processes that `parent` has started, in order of rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
            family = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"equipoise.demo.worker" in words and int(family[1]) == parent:
            rank = next(item for item in environment if item.startswith(b"RANK="))
            found[int(rank[5:])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_service(process: subprocess.Popen[str], ranks: int) -> list[int]:
    """Wait until the first lines of progress: all ranks serve."""
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert next((line for line in lines if "steps" in line), None), "it ended before any step"
    found = workers(process.pid)
    assert len(found) == ranks
    return found


def test_a_run_can_be_watched_while_it_lasts_and_looked_at_afterwards(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    port, out, trace = free_port(2), tmp_path / "out", tmp_path / "trace.json"
    watched = ("--metrics-port", str(port), "--log-epochs", "--log-balancedness")
    serving = ("--ranks", "2", "--slots", "36", "--steps", "30", *CADENCE[:-1])
    process = start(*serving, *watched, "--trace", str(trace), "--out", str(out))
    try:
        wait_for_service(process, ranks=2)
        for rank in (0, 1):
            with urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=30) as answer:
                assert "equipoise_balancedness{" in answer.read().decode()
    finally:
        _, _, told = (process, *finish(process)[1:])
    epochs = json.loads((out / "summary.json").read_text())["epochs"]
    lines = [line for line in told.splitlines() if "equipoise.epochs engine=exact" in line]
    assert sum("outcome=committed" in line for line in lines) == epochs
    assert "equipoise.balancedness engine=exact" in told
    written = json.loads(trace.read_text())
    assert faults(written) == []
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert sum(event["name"] == "step" for event in spans) == 60


def test_a_run_moves_experts_and_changes_no_bit(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    code, out, err = finish(start("--ranks", "4", "--json", str(report), *SWITCHING,
                                  "--out", str(tmp_path)))  # fmt: skip
    assert code == 0, out + err
    figures = json.loads(report.read_text())
    assert set(KEYS.split()) <= set(figures)
    assert out.splitlines()[-1] == "outputs identical: yes"
    assert figures["outputs_identical"] is True
    assert figures["slots_moved"] > 0
    assert figures["imbalance_balanced"] * 2 < figures["imbalance_unbalanced"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_run_of_one_rank_and_of_two_gives_the_same_outputs(tmp_path: Path) -> None:
    digests = []
    for ranks in ("1", "2"):
        report = tmp_path / f"{ranks}.json"
        finish(start("--ranks", ranks, "--json", str(report), *SMALL, "--out", str(tmp_path)))
        figures = json.loads(report.read_text())
        assert figures["outputs_identical"] is True
        digests.append(figures["reference_outputs"])
    assert digests[0] == digests[1]


def test_one_copy_that_is_not_committed_makes_the_outputs_differ(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    broken = ("--ranks", "4", "--backend", "support.faulty:FORGETFUL")
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, _ = finish(start(*broken, *where, *SHORT))
    figures = json.loads(report.read_text())
    assert figures["slots_moved"] > 0
    assert figures["outputs_identical"] is False
    assert "outputs identical: no" in out
    assert code == 1


def test_a_run_that_rewrites_layers_under_locks_changes_no_bit(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    code, out, err = finish(start("--ranks", "4", "--commit", "locked", *where, *SHORT))
    assert code == 0, out + err
    figures = json.loads(report.read_text())
    assert figures["slots_moved"] > 0
    assert figures["outputs_identical"] is True


def test_a_run_whose_slots_retire_for_want_of_staging_changes_no_bit(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    where = ("--json", str(report), "--out", str(tmp_path))
    tight = ("--ranks", "4", "--slots", "48", "--in-flight", "120KiB", "--log-epochs")
    code, out, err = finish(start(*tight, *where, *SHORT[:-1]))
    assert code == 0, out + err
    assert " retired=" in err
    figures = json.loads(report.read_text())
    assert figures["slots_moved"] > 0
    assert figures["outputs_identical"] is True


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_losing_a_rank_ends_the_run_with_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    deadline = 12.0
    process = start("--ranks", "4", "--steps", "60", "--deadline", str(deadline),
                    "--out", str(tmp_path))  # fmt: skip
    ranks = wait_for_service(process, 4)
    os.kill(ranks[2], getattr(signal, name))
    began = time.monotonic()
    code, _, err = finish(process)
    took = time.monotonic() - began
    last = err.splitlines()[-1]
    assert code == 3
    assert last.startswith("equipoise: error: rank 2 ")
    assert "step" in last
    assert "all_to_all" in last or "all_reduce" in last or "vote" in last
    assert "Traceback" not in err
    assert took < deadline
    assert not any(alive(rank) for rank in ranks)
    assert set(os.listdir("/dev/shm")) <= shared


def wait_for_reference(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "reference" not in (line := process.stderr.readline()):
        assert line, "the run ended before its reference pass"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_losing_the_last_rank_during_the_reference_is_noticed_by_the_launcher(
    name: str, tmp_path: Path
) -> None:
    deadline = 40.0
    process = start("--ranks", "2", "--steps", "24", "--no-balance", "--deadline", str(deadline),
                    "--out", str(tmp_path))  # fmt: skip
    (first, *_) = wait_for_service(process, 2)
    wait_for_reference(process)
    os.kill(first, getattr(signal, name))
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < deadline
    assert code == 3
    last = err.splitlines()[-1]
    assert last.startswith("equipoise: error: rank 0 ")
    assert last.endswith("during the reference pass")


def test_a_module_beside_the_user_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('wrong random')\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("equipoise")), "run", "--ranks", "1", "--steps", "4",
         "--no-balance", "--text", TEXT, "--out", "o", "--json", "f.json", "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (tmp_path / "f.json").exists(), done.stderr


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--steps", "60", "--out", str(tmp_path))
    ranks = wait_for_service(process, 2)
    process.kill()
    process.communicate(timeout=30)
    expiry = time.monotonic() + 20
    while any(alive(rank) for rank in ranks) and time.monotonic() < expiry:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)


def test_an_interrupt_ends_every_rank_with_one_line(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--steps", "60", "--out", str(tmp_path))
    ranks = wait_for_service(process, 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "Traceback" not in err
    assert not any(alive(rank) for rank in ranks)


def test_torchrun_may_start_the_ranks(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m",
         "equipoise", "run", "--ranks", "2", "--json", str(report), *SMALL,
         "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert report.exists(), launched.stderr
    assert json.loads(report.read_text())["outputs_identical"] is True
