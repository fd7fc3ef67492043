"""Marks of tests that run vLLM."""

import os

import pytest

from vllm_runs.run import LIMIT

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
vllm = [pytest.mark.vllm, pytest.mark.timeout(3 * LIMIT)]
"""`pytestmark = vllm`: deselected everywhere but in tox's environments of that name."""
deep = pytest.mark.skipif(not DEEP, reason="a mode that runs in `tox -e vllm-deep`")
"""Nothing else skips a mode: where it cannot run, it fails."""
