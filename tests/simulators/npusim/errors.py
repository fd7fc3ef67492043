"""What can go wrong before the command runs."""


class Refused(Exception):
    """The input or the machine does not do; the message is one line. Exit code 2."""


class BuildFailed(Exception):
    """The simulator could not be built; the message is everything the tools said. Exit code 2."""
