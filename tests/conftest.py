"""How many examples hypothesis tries: `ci` by default, `deep` by HYPOTHESIS_PROFILE=deep."""

import os

from hypothesis import HealthCheck, settings

# No deadline: tests share the machine with other work, and no test asserts a time.
settings.register_profile("ci", deadline=None)
settings.register_profile(
    "deep", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
