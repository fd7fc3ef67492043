"""What a stream lock has to do, as a few numbers: the oracle of its property."""

from dataclasses import dataclass

from equipoise.hal.errors import (
    LockMisuse,
    LockPoisoned,
    StaleEpoch,
    StreamError,
    StreamTimeout,
)

Errors = tuple[type[StreamError], ...]
"""Of which one is due; none when the call must succeed."""


@dataclass
class LockModel:
    """A lock whose sections, each an acquire and a release, are all launched on one stream.

    Always settled: whatever can pass has passed.

    Attributes:
        epoch: that runs.
        owns: whether the mover may write.
        full: a signal was given that no acquire has taken.
        empty: a release has come that no wait has taken.
        poisoned: the epoch is void.
        launched: sections launched so far.
        passed: those of them that went through.
    """

    epoch: int = 0
    owns: bool = True
    full: bool = False
    empty: bool = False
    poisoned: bool = False
    launched: int = 0
    passed: int = 0

    def section(self) -> Errors:
        """Launch one."""
        self.launched += 1
        return self._settled()

    def signal(self) -> Errors:
        """The mover has written."""
        if self.poisoned:
            return self._voided()
        if not self.owns:
            return (LockMisuse,)
        self.owns, self.full = False, True
        return self._settled()

    def wait(self) -> Errors:
        """The mover wants to write."""
        if self.poisoned:
            return self._voided()
        if self.owns:
            return (LockMisuse,)
        if not self.empty:
            return (StreamTimeout,)
        self.owns, self.empty = True, False
        return ()

    def poison(self) -> Errors:
        """Somebody gives the epoch up."""
        self.poisoned = True
        return self._settled()

    def drain(self) -> Errors:
        """Begin the next epoch, if nothing of this one is under way."""
        if self.passed < self.launched:
            return (StreamTimeout,)
        self.epoch += 1
        self.owns, self.full, self.empty, self.poisoned = True, False, False, False
        return ()

    def late(self) -> Errors:
        """A verb of the epoch before: it may not even look at the words."""
        return (StaleEpoch,)

    def check(self) -> Errors:
        """Whether the epoch is void."""
        return (LockPoisoned,) if self.poisoned else ()

    def _voided(self) -> Errors:
        """Out of turn as well as void: either may be said."""
        return (LockPoisoned, LockMisuse)

    def _settled(self) -> Errors:
        """Let pass what can."""
        if self.poisoned:
            self.passed = self.launched
        elif self.full and self.passed < self.launched:
            self.full, self.empty = False, True
            self.passed += 1
        return ()
