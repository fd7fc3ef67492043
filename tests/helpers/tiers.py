"""Which tier runs: every commit, or `tox -e deep`."""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
"""Of hypothesis, and of the conformance suite: `ci` or `deep`."""
if PROFILE not in ("ci", "deep"):
    raise SystemExit(f"HYPOTHESIS_PROFILE is {PROFILE!r}: it may be `ci` or `deep`")
DEEP = PROFILE == "deep"
