"""Why servers are not launched: one exception tree.

LaunchError
└── BadInput
"""


class LaunchError(Exception):
    """Something could not be started, or died; one line, or with the end of a log behind it."""

    code = 3


class BadInput(LaunchError):
    """What was asked for cannot be."""

    code = 2


def line_of(error: BaseException) -> str:
    """The first line of what it says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
