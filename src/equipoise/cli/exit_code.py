"""From a command to an exit code: what ends it, in one line on standard error."""

import os
from collections.abc import Callable
from errno import ENOSPC

from equipoise.cli import import_errors, process
from equipoise.cli.process import TerminatedBySignal, raise_on_signal
from equipoise.hal.errors import EquipoiseError, UsageError

EXIT_STDOUT_CLOSED = 1
EXIT_BAD_INPUT = 2
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130


def run_to_exit_code(run: Callable[[], int]) -> int:
    """Run one command; errors on purpose become one line on standard error.

    Exit codes: what the command returns, 1 if standard output was closed, 2 bad input or no torch
    where the command needs it, 3 another error on purpose or of the system, 130 interrupted,
    128 + n terminated by signal n.
    """
    # Before torch is imported: its sockets warn of host names that are not needed here.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Extensions of torch load when a backend asks for them: one that does not find its driver
    # would end every command here, `doctor` first.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    process.open_missing_streams()
    try:
        with raise_on_signal():
            return run()
    except UsageError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except EquipoiseError as error:
        return _fail(error, EXIT_FAILED)
    except BrokenPipeError:
        process.redirect_broken_streams()
        return EXIT_STDOUT_CLOSED
    except OSError as error:
        # Files are written by functions that name them: a full disk without a name is a stream's,
        # which holds nothing any more where it is not buffered.
        full = error.errno == ENOSPC and error.filename is None
        if process.redirect_broken_streams() or full:
            return _fail(EquipoiseError(f"standard output: {error.strerror or error}"), EXIT_FAILED)
        return _fail(error, EXIT_FAILED)
    except ImportError as error:
        if import_errors.failing_package(error) is None:
            raise  # a bug of this program: the traceback is needed to fix it
        process.print_stderr(f"error: {import_errors.explain_import_error(error)}")
        # What is missing can be installed: as with an option that this machine cannot serve.
        return EXIT_BAD_INPUT if import_errors.missing_module(error) else EXIT_FAILED
    except KeyboardInterrupt:
        process.print_stderr("interrupted")
        return EXIT_INTERRUPTED
    except TerminatedBySignal as termination:
        process.print_stderr(f"terminated by {termination}")
        return termination.exit_code


def _fail(error: Exception, code: int) -> int:
    line = " ".join(str(error).split()) or type(error).__name__
    printable = "".join(letter if letter.isprintable() else "?" for letter in line)
    process.print_stderr(f"error: {printable}")
    return code
