"""Explains a failed import in one line: a package is missing, or its libraries do not load."""

import traceback

from equipoise import install_command

OURS = "equipoise"
NATIVE = "equipoise._native"
OPTIONAL = {"torch": "torch", "hypothesis": "conformance"}
"""Modules that only some commands need, with the extra that brings them."""
REMEDIES = {
    "torch": "install the build of torch for this machine, with the libraries that it asks for",
    NATIVE: "install equipoise again, for this Python",
}
"""What to do about a package that does not import; of others: install it again."""


def missing_module(error: Exception) -> str | None:
    """The optional module that is not installed; None where the error is another."""
    # By the name alone: a package that goes on without torch may be who asked for it.
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing if missing in OPTIONAL else None


def explain_import_error(error: Exception) -> str:
    """What does not import, why, and what to do."""
    if module := missing_module(error):
        return f"{module} is missing: {install_command(OPTIONAL[module])}"
    package = failing_package(error)
    reason = " ".join(str(error).split()) or type(error).__name__
    if package is None:
        return reason
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return f"{package} is missing: install it"
    cure = REMEDIES.get(package, f"install {package} again")
    return f"{package} does not import: {reason}; {cure}"


def failing_package(error: Exception) -> str | None:
    """The package that did not import; None where that is a module of equipoise in Python.

    The innermost frame of a package that is not ours: a library that does not load is named by the
    loader alone, and not by who asked for it.
    """
    # A native core that was not built is missed as a name of the package.
    if isinstance(error, ImportError) and (error.name == NATIVE or "'_native'" in str(error)):
        return NATIVE
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package and package not in (OURS, "importlib", "ctypes", "__main__"):
            return package
    name = error.name if isinstance(error, ImportError) else None
    package = (name or "").partition(".")[0]
    return None if package in ("", OURS) else package
