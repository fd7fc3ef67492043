"""Keeps the interpreter alive while daemon threads are inside C++ calls.

Up to CPython 3.13 a thread that asks for the interpreter's lock while the interpreter shuts down is
unwound where it is (`pthread_exit`; python/cpython issue 87135). A binding asks for it in a
destructor, which must not be unwound: the process, with all its work done, dies of `terminate
called without an active exception`. So daemon threads enter this guard around calls into torch or a
device's library, and the interpreter waits at exit, for a bounded time, until no thread is inside.
Threads of `backends/mpi` do not use it yet: the crash was not seen there.
"""

import atexit
import os
import threading
from contextlib import ContextDecorator

EXIT_TIMEOUT = 1.0
"""Seconds that the interpreter waits at exit for threads inside native calls."""


class NativeCallGuard(ContextDecorator):
    """A context that daemon threads hold around calls that release the interpreter's lock.

    Also a decorator, for a function that makes one such call.
    """

    def __init__(self) -> None:
        self._reset()

    def __enter__(self) -> None:
        """Raises `SystemExit`, which ends a thread silently, once the interpreter shuts down."""
        with self._changed:
            if self._over:
                raise SystemExit
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._over:
                self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Admit no more threads; returns whether all have left within `timeout` seconds."""
        with self._changed:
            self._over = True
            return self._changed.wait_for(lambda: not self._inside, timeout)

    def _reset(self) -> None:
        """Reset to the state of a process without threads, such as the child of a fork."""
        self._changed = threading.Condition()
        self._inside = 0
        self._over = False


NATIVE_CALL_GUARD = NativeCallGuard()
"""Of this process."""

atexit.register(NATIVE_CALL_GUARD.close, EXIT_TIMEOUT)
os.register_at_fork(after_in_child=NATIVE_CALL_GUARD._reset)
