"""Family *locks*: hand-over between a stream and a mover on the host."""

from equipoise.hal.conformance.lock_epochs import EPOCHS
from equipoise.hal.conformance.lock_graphs import CAPTURED
from equipoise.hal.conformance.lock_turns import TURNS
from equipoise.hal.conformance.lock_waits import BESIDE, DEADLINE, ONE_WAITER

PROPERTIES = (TURNS, ONE_WAITER, CAPTURED, EPOCHS, DEADLINE, BESIDE)
