"""Who is compared, by name."""

from collections.abc import Callable

from handover import Handover, Station
from handover_blocking import Blocking
from handover_channel import Channel
from handover_coordinator import Coordinator
from handover_word import Word

BLOCKING, COORDINATOR, OURS, WORD = "blocking", "coordinator", "channel", "a word"
BASELINES = BLOCKING, COORDINATOR
HANDOVERS: dict[str, Callable[[Station], Handover]] = {
    BLOCKING: Blocking,
    COORDINATOR: Coordinator,
    OURS: Channel,
    WORD: Word,
}
"""Every rank makes the one that is named, anew for each run and at the same time as all others."""
