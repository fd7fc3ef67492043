"""How many examples hypothesis tries, and the rank processes that multi-process tests share.

`ci` by default, `deep` by HYPOTHESIS_PROFILE=deep, and `quick` where slow tests are left out, as a
bare `pytest` does.
"""

import os
import signal
from collections.abc import Iterator

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.tiers import PROFILE
from hypothesis import HealthCheck, settings

# torch's store looks up the name of every peer; where a name server drops datagrams, each drop
# costs 5 s. Over TCP none is lost. Read at a process's first look-up.
os.environ.setdefault("RES_OPTIONS", "use-vc")
# No deadline: tests share the machine with other work, and no test asserts a time.
settings.register_profile("ci", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile(
    "deep", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(PROFILE)


def pytest_configure(config: pytest.Config) -> None:
    """A bare `pytest` answers in two minutes: it also tries each property less often."""
    if PROFILE == "ci" and "not slow" in config.option.markexpr:
        settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def heard_signals() -> None:
    """Children hear what is sent to them, also where a shell started the tests in the background,
    deaf to interrupts, or nohup did: what a process ignores its children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            heard = number is signal.SIGINT
            signal.signal(number, signal.default_int_handler if heard else signal.SIG_DFL)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of rank processes: `ranks.run(program, size, **arguments)`."""
    pool = Ranks()
    yield pool
    pool.close()
