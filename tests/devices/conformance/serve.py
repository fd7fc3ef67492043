"""Serves a little text on so many ranks, and demands that balancing changed no bit of the output.

    python -m npusim --schedule eager -- python tests/devices/conformance/serve.py 2 4

The main job with its own number of steps takes minutes on simulated devices (see
`devices/test_suites.py`); this one is long enough for several epochs with moves, and too short for
one in each phase.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STEPS = ("--steps", "18", "--step-interval", "3", "--window-size", "2")
RUN = (sys.executable, "-m", "equipoise", "run", "--backend", "ascend", "--quiet", *STEPS)
EXPECTED = (0, 1)
"""1: not every phase has had its epochs, for which there are too few steps."""
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
        done = subprocess.run([*RUN, "--ranks", ranks, *files], timeout=LIMIT, check=False)
        if not figures.exists() or done.returncode not in EXPECTED:
            return 1
        told = json.loads(figures.read_text())
    identical, copies = told["outputs_identical"], told["slots_moved"]
    print(f"{ranks} ranks: outputs identical {identical}, {copies} copies moved", flush=True)
    return 0 if identical and copies else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["2"]))
