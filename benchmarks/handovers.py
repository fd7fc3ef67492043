"""Who is compared, by name."""

from collections.abc import Callable

from handover import Handover, Station
from handover_blocking import Blocking
from handover_coordinator import Coordinator

BLOCKING, COORDINATOR = "blocking", "coordinator"
HANDOVERS: dict[str, Callable[[Station], Handover]] = {
    BLOCKING: Blocking,
    COORDINATOR: Coordinator,
}
