"""A plugin of pytest: what the tests of each folder cost, in seconds of processor time.

    pytest -p helpers.cpu_by_folder -n 0 tests/unit

Processes that a test starts and waits for are counted with it. Run in one process: what an
interpreter of pytest-xdist measures it does not tell.
"""

import resource
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from helpers.paths import ROOT

DEPTH = 2
"""Of the folders that are told apart, below `tests`."""
CPU_SECONDS: defaultdict[str, float] = defaultdict(float)
ITEMS: Counter[str] = Counter()


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around a test with its fixtures."""
    folder = "/".join(item.path.relative_to(ROOT).parent.parts[1 : 1 + DEPTH])
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        CPU_SECONDS[folder] += _cpu_seconds() - before
        ITEMS[folder] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table."""
    terminalreporter.section("CPU seconds by folder")
    for folder in sorted(CPU_SECONDS):
        terminalreporter.write_line(f"{CPU_SECONDS[folder]:8.1f}  {ITEMS[folder]:5}  {folder}")
    terminalreporter.write_line(f"{sum(CPU_SECONDS.values()):8.1f}  {ITEMS.total():5}  in all")
