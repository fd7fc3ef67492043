"""Prints the CPU seconds of each environment, its making included, and of the whole run.

Wall time is stretched by whatever else a machine does; CPU seconds can be compared.
"""

import atexit
import os
import resource

from tox.plugin import impl
from tox.tox_env.api import ToxEnv

_spent: dict[str, float] = {}
_before = 0.0


def _cpu_seconds() -> float:
    """Of this process and of all its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


@impl
def tox_env_teardown(tox_env: ToxEnv) -> None:
    """Charge what has been spent since the last one to this environment."""
    global _before
    now = _cpu_seconds()
    _spent[tox_env.name] = _spent.get(tox_env.name, 0.0) + now - _before
    _before = now


@atexit.register
def _print_table() -> None:
    for name, seconds in _spent.items():
        print(f"CPU seconds of {name}: {seconds:.0f}")
    # `tox run-parallel` starts a process like this for each environment; `tox list` runs nothing.
    total = round(_cpu_seconds())
    if total > 0 and "TOX_PARALLEL_ENV" not in os.environ:
        print(f"CPU seconds in all: {total}", flush=True)
