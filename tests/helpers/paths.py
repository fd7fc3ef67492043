"""Places of the repository, and the search path of processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SIMULATORS = TESTS / "simulators"
SEARCH_PATH = os.pathsep.join([str(TESTS), str(SIMULATORS)])
"""PYTHONPATH with which a process finds the helpers and the simulators."""
