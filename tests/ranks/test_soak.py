"""Epoch after epoch, and nothing grows: memory, threads, descriptors, shared memory, keys."""

from typing import Any

import pytest
from hypothesis import settings
from ranks.cases import soak
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
DEEP = settings.get_current_profile_name() == "deep"
WARM, EPOCHS, WATCHDOG = (1_200, 10_000, 3_600.0) if DEEP else (40, 60, 60.0)
"""Epochs that move weights: before the first count and after it. The deep ones are warm when the
engine drops its oldest reports."""
RESIDENT = 4 << 20 if DEEP else 2 << 20
"""Bytes of resident memory that may come and go: heaps of C and of Python give back whole pages."""
PER_EPOCH = 1 if DEEP else 30
"""Objects of Python an epoch: those of its report while reports are still filled up, and nothing
afterwards."""
TWO_EPOCHS = 100
"""Keys, and items of a container: more than two epochs ask and start, less than ten do."""


@pytest.mark.parametrize("commit", ["boundary", "locked"])
def test_nothing_grows_however_many_epochs_there_are(ranks: Ranks, commit: str) -> None:
    stories = ranks.run(soak.serve, 2, watchdog=WATCHDOG, commit=commit, warm=WARM, epochs=EPOCHS)
    print(stories)
    for story in stories:
        assert story["wrong"] == []
        assert story["outcomes"]["moved"] >= WARM + EPOCHS
        assert grown(story["before"], story["after"]) == {}


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {}
