"""Every benchmark runs in its quick form, and keeps nothing."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
QUICK = {
    "run": "run.py --quick",
    "closed loop": "run.py --closed-loop --quick",
    "placement": "placement.py --quick --shapes a",
    "active_experts": "active_experts.py --quick",
    "routing": "routing.py --quick",
    "shares": "shares.py --quick",
    "shares bound": "shares.py --bound --quick",
    "shares speed": "shares.py --speed --quick",
    "shares exchange": "shares.py --exchange --quick",
    "staging planning": "staging.py --planning --quick",
    "engine_stall": "engine_stall.py --quick",
    "pipeline": "pipeline.py --quick --link loopback",
    "request_routing": "request_routing.py --quick",
    "request_routing speed": "request_routing.py --speed --quick",
    "request_ablations": "request_ablations.py --only drafting",
    "live_picture": "live_picture.py --quick",
    "live_routing": "live_routing.py --quick",
    "shared_policy": "shared_policy.py --quick",
    "proxy": "proxy.py --quick",
    "proxy cpu": "proxy.py --cpu --quick",
    "start": "start.py --quick",
    "vllm_policy": "vllm_policy.py --quick",
    "policy_moves": "policy_moves.py --quick",
    "gpu_speed": "gpu_speed.py --backend cpu",
    "on_hardware": "on_hardware.py --backend virtual --only doctor --out {tmp}/report.tar.gz",
}
"""Arguments of each."""
pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", QUICK)
def test_benchmark_runs_quickly_and_keeps_nothing(name: str, tmp_path: Path) -> None:
    if name == "vllm_policy" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    before = {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()}
    script, *arguments = QUICK[name].format(tmp=tmp_path).split()
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout
    assert {path: path.read_bytes() for path in (BENCHMARKS / "results").iterdir()} == before
