"""Which tier runs: every commit, or `tox -e deep`."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
"""Of hypothesis, and of the conformance suite: `ci` or `deep`."""
DEEP = PROFILE == "deep"
