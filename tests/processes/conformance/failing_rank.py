"""A rank module that raises before it serves."""


def main() -> None:
    """Raise."""
    raise RuntimeError("this module is no rank")
