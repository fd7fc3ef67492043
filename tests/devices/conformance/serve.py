"""Serves a little text on so many ranks, and demands that balancing changed no bit of the output.

    python -m npusim --schedule eager -- python tests/devices/conformance/serve.py 2

The main job with its own number of steps takes minutes on simulated devices (`tox -e deep`); this
one has 12 steps of one text and serves the variants `local` and `exact`, beside the reference
process. The few redundant slots make experts move in the first rebalances, on two ranks too.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

TEXT = ("--text", str(resources.files("equipoise.demo").joinpath("text", "tables.txt")))
STEPS = ("--steps", "12", "--step-interval", "2", "--window-size", "2")
PATIENT = ("--deadline", "120")
"""No rank is lost here. By default a rank that gets no core for 20 seconds would be."""
OPTIONS = (*TEXT, *STEPS, *PATIENT, "--slots", "36", "--variants", "local", "exact", "--quiet")
RUN = (sys.executable, "-m", "equipoise", "run", "--backend", "ascend", *OPTIONS)
EXPECTED = (0, 1)
"""1: the phase has not had its two rebalances, for which there may be too few steps."""
LIMIT = 600.0
"""Seconds that a run may take."""


def main(counts: Sequence[str]) -> int:
    """0 when every run gave identical outputs, and moved experts."""
    return max(serve(count) for count in counts)


def serve(ranks: str) -> int:
    """One run; what it moved is read from its figures."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        files = ("--out", folder, "--json", str(figures))
        completed = subprocess.run([*RUN, "--ranks", ranks, *files], timeout=LIMIT, check=False)
        if not figures.exists() or completed.returncode not in EXPECTED:
            return 1
        report = json.loads(figures.read_text())
    identical, copies = report["outputs_identical"], report["copies"]
    print(f"{ranks} ranks: outputs identical {identical}, {copies} copies moved", flush=True)
    return 0 if identical and copies else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["2"]))
