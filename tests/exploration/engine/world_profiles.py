"""What ranks live on: networks and devices whose traps an engine has to cope with."""

from dataclasses import replace

from equipoise.backends.virtual.backend import ALL_COMMUNICATOR_CAPABILITIES, VirtualBackend
from equipoise.backends.virtual.profiles import PROFILES

_SERIAL = PROFILES["serial-groups"]
WORLDS = {
    "independent": VirtualBackend(),
    "serial-groups": PROFILES["serial-groups"],
    "off-stream": VirtualBackend(
        groups=replace(ALL_COMMUNICATOR_CAPABILITIES, stream_ordered=False)
    ),
    "serial-off-stream": VirtualBackend(
        _SERIAL.parts, groups=replace(_SERIAL.groups, stream_ordered=False)
    ),
    "lagging-query": PROFILES["lagging-query"],
    "aliasing-pool": PROFILES["aliasing-pool"],
    "one-signal-one-waiter": PROFILES["one-signal-one-waiter"],
}
"""By name; off the stream's order operations start at once, wherever the streams are."""
