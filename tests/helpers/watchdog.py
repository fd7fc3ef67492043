"""How long a test waits for what is expected to happen."""

WATCHDOG = 200.0
"""Seconds after which such a wait fails its test; below pytest's own 300.

Long, because a busy machine may be slow by any factor: a wait that goes well ends earlier, and no
result may depend on how fast the machine is. Waits that are expected to expire have bounds of
their own.
"""
