"""Devices and networks with a vendor's trap in them, that keep what they declare all the same.

Each is a backend of its own, `equipoise.backends.virtual.profiles:NAME`.
"""

from dataclasses import replace

import torch

from equipoise.backends.virtual.arena import PaddedArena
from equipoise.backends.virtual.backend import EVERY_OPERATION, EVERYTHING, VirtualBackend
from equipoise.backends.virtual.device import AliasingDevice
from equipoise.backends.virtual.event import LaggingMark, OneShotMark
from equipoise.backends.virtual.linking import LinkingCommunicator, LinkingOutbox
from equipoise.backends.virtual.network import CoalescingGroup
from equipoise.backends.virtual.parts import HEALTHY
from equipoise.backends.virtual.serial import SerialCommunicator, SerialNetwork

LAGGING_QUERY = VirtualBackend(replace(HEALTHY, mark=LaggingMark))
"""A query says false for some micro-steps after the point was reached."""

ALIASING_POOL = VirtualBackend(
    replace(HEALTHY, device=AliasingDevice),
    replace(EVERYTHING, streams=1, stream_lock=False, copy_independent_of_launch=False),
)
"""All roles share one queue: nothing may wait on one role for what comes later on another."""

ONE_SIGNAL_ONE_WAITER = VirtualBackend(replace(HEALTHY, mark=OneShotMark))
"""A native event feeds one wait and empties itself."""

BLOCKING_LINKS = VirtualBackend(
    replace(HEALTHY, outbox=LinkingOutbox, communicator=LinkingCommunicator)
)
"""The first operation between two ranks blocks until both have come to it."""

ONE_HANDLE_A_BATCH = VirtualBackend(replace(HEALTHY, group=CoalescingGroup))
"""However many messages a batch has, the list of its handles has one element."""

NO_ABORT = VirtualBackend(groups=replace(EVERY_OPERATION, abort=False))
"""Nothing ends an operation in flight but its deadline."""

PADDED_FORMATS = VirtualBackend(replace(HEALTHY, arena=PaddedArena))
"""Storage goes on behind the bytes that a tensor shows."""

NO_BYTE_SUMS = VirtualBackend(
    groups=replace(EVERY_OPERATION, reductions=EVERY_OPERATION.reductions - {torch.uint8})
)
"""Bytes travel, but are not summed."""

SERIAL_GROUPS = VirtualBackend(
    replace(HEALTHY, network=SerialNetwork, communicator=SerialCommunicator),
    groups=replace(EVERY_OPERATION, independent_groups=False),
)
"""An operation waits for all that its rank issued earlier, on whatever communicator."""

PROFILES = {
    "lagging-query": LAGGING_QUERY,
    "aliasing-pool": ALIASING_POOL,
    "one-signal-one-waiter": ONE_SIGNAL_ONE_WAITER,
    "blocking-links": BLOCKING_LINKS,
    "one-handle-a-batch": ONE_HANDLE_A_BATCH,
    "no-abort": NO_ABORT,
    "padded-formats": PADDED_FORMATS,
    "no-byte-sums": NO_BYTE_SUMS,
    "serial-groups": SERIAL_GROUPS,
}
"""By name."""
