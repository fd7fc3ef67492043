"""Commands on a machine whose torch is missing, or does not load its libraries."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.serve.outcomes import RequestOutcome
from equipoise.serve.request_log import RequestRecord

pytestmark = pytest.mark.slow

BOUND = 120.0
BLOCKED = """
import sys
sys.modules["torch"] = None
from equipoise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
TORCH_IMPORT_ERROR = 'raise ImportError("libcudart.so.13: cannot open shared object file")\n'
READING = """
import sys
sys.modules["torch"] = None
from equipoise.balancer.formats import RoutingTrace, read_trace
for path in sys.argv[1:]:
    trace = read_trace(path)
    for part in trace.parts() if isinstance(trace, RoutingTrace) else trace.blocks(1 << 20):
        pass
    print(path)
"""
INSTALL = "torch is missing: pip install '.[torch]' in a clone of equipoise"
NEEDS_TORCH = {
    *("AsyncIntermediateTensors", "Connection", "ModelBalancer", "ModelRegistry", "TensorChannel"),
    *("VariableSizeExchange", "check_backend", "connect", "open_balancer"),
}
NAMES = """
import sys
sys.modules["torch"] = None
import equipoise
for name in equipoise.__all__:
    try:
        getattr(equipoise, name)
    except ModuleNotFoundError as error:
        print(error)
"""
SHAPE = ("--ranks", "4", "--slots", "12")
COMMANDS = {
    "plan": ("plan", "counts.npy", *SHAPE, "-o", "new.json"),
    "report": ("report", "counts.npy", "--placement", "map.json", "--html", "report.html"),
    "convert": ("convert", "map.json", "map.yaml"),
    "advise": ("advise", "counts.npy", "--ranks", "4"),
    "replay": (
        "replay", "counts.npy", "--ranks", "4", "--engine", "equipoise", "--html", "replay.html",
    ),
    "simulate": ("simulate", "--workload", "prop", "--workers", "2", "--requests", "40"),
    "route-report": ("route-report", "log"),
    "route": ("route", "--help"),
    "picker": ("picker", "--help"),
}  # fmt: skip
SERVERS = (
    (
        ("route", "--workers", "http://127.0.0.1:9", "--slots", "1", "--port", "0"),
        "serving on http://127.0.0.1:",
    ),
    (("policy-server", "--port", "0", "--metrics-port", "0"), "policy on port "),
)
RECORD = RequestRecord(
    run=10.0, streamed=True, id="a", path="/v1/completions", model="m", worker="rank 0",
    attempts=1, arrived_at=11.0, bound_at=12.0, first_answer_at=13.0, ended_at=14.0, prompt=5,
    output=6, outcome=RequestOutcome.COMPLETED,
)  # fmt: skip


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = np.arange(2 * 3 * 8, dtype=np.int64).reshape(2, 3, 8) ** 2
    np.save("counts.npy", counts)
    placement_plan = plan(counts, slots=12, ranks=4)
    formats.write_placement(
        "map.json", formats.ExpertPlacement(placement_plan.placement, placement_plan.shares, 4)
    )
    Path("log").write_text(RECORD.to_line())


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments],
        capture_output=True, text=True, timeout=BOUND, check=False,
    )  # fmt: skip


def with_broken_torch(tmp_path: Path, source: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, where `source` is the whole of torch."""
    package = tmp_path / "broken" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(source)
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(package.parent), *([before] if before else [])])
    completed = subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments],
        capture_output=True, text=True, timeout=BOUND, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return completed.returncode, completed.stdout, completed.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_offline_command_works_without_torch(command: str) -> None:
    completed = without_torch(*COMMANDS[command])
    assert (completed.returncode, completed.stderr.count("Traceback")) == (0, 0), completed.stderr


@pytest.mark.skipif(find_spec("aiohttp") is None, reason="both take aiohttp")
@pytest.mark.parametrize(("command", "line"), SERVERS)
def test_server_serves_without_torch(command: tuple[str, ...], line: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, *command], stderr=subprocess.PIPE, text=True
    ) as proxy:
        try:
            assert proxy.stderr is not None
            assert proxy.stderr.readline().startswith(f"equipoise: {line}")
            proxy.send_signal(signal.SIGTERM)
            _, stderr = proxy.communicate(timeout=BOUND)
        finally:
            proxy.kill()
    assert (proxy.returncode, stderr.count("Traceback")) == (0, 0), stderr


@pytest.mark.parametrize("command", [("run",), ("record", "-o", "counts"), ("conformance",)])
def test_serving_command_says_how_to_install_torch(command: tuple[str, ...]) -> None:
    completed = without_torch(*command)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == f"equipoise: error: {INSTALL}\n"


def test_names_that_need_no_torch_are_imported_without_it() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=BOUND, check=False
    )
    assert set(completed.stdout.splitlines()) == {
        f"equipoise.{name} needs torch: pip install '.[torch]' in a clone of equipoise"
        for name in NEEDS_TORCH
    }, completed.stderr


@pytest.mark.parametrize("command", [("run",), ("record", "-o", "counts"), ("conformance",)])
def test_serving_command_reports_broken_torch_in_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    code, _, stderr = with_broken_torch(tmp_path, TORCH_IMPORT_ERROR, *command)
    assert (code, len(stderr.splitlines())) == (3, 1), stderr
    assert stderr.startswith(
        "equipoise: error: torch does not import: libcudart.so.13: cannot open"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (TORCH_IMPORT_ERROR, "torch does not import: libcudart.so.13: cannot open"),
        ("", "torch is not whole"),
    ],
)
def test_doctor_reports_broken_torch_and_all_else(tmp_path: Path, source: str, reason: str) -> None:
    code, out, stderr = with_broken_torch(tmp_path, source, "doctor", "--json", "found.json")
    assert (code, stderr) == (1, "equipoise: findings: found.json\n")
    assert out.splitlines()[-1] == "no accelerator works: see the reasons above"
    findings = json.loads(Path("found.json").read_text())
    checks = {check["name"]: check for check in findings["checks"]}
    assert checks["torch"]["passed"] is False
    assert checks["torch"]["detail"].startswith(reason)
    assert checks["native core"]["passed"] is True
    accelerator_names = {point.name for point in entry_points(group="equipoise.accelerators")}
    assert {backend["name"] for backend in findings["accelerators"]} == accelerator_names


def test_doctor_reports_missing_torch() -> None:
    completed = without_torch("doctor")
    assert completed.returncode == 1, completed.stderr
    assert f"MISSING: {INSTALL}" in " ".join(completed.stdout.split())


def test_routing_traces_are_read_without_torch() -> None:
    traces = sorted(
        str(path) for path in (ROOT / "tests/data/traces").iterdir() if path.suffix != ".md"
    )
    done = subprocess.run(
        [sys.executable, "-c", READING, *traces, "counts.npy"],
        capture_output=True, text=True, timeout=BOUND, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [*traces, "counts.npy"], done.stderr
