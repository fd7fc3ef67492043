"""Keeps Mixture-of-Experts serving in balance on any accelerator.

Importing this package imports no vendor module, initialises no device and starts no thread.
"""

__version__ = "0.1.0"


def install_command(extra: str) -> str:
    """What brings an optional part, for people.

    No package index has this package: under its name there would be somebody else's.
    """
    return f"pip install '.[{extra}]' in a clone of equipoise"
