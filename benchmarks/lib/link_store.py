"""A rendezvous store that its launcher starts on a link: `python link_store.py ADDRESS`.

The launcher cannot hold it itself: it is in another network namespace than its ranks. Prints the
port; ends when its standard input does.
"""

import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

START = 30.0
"""Seconds for the store to come up."""


def main() -> None:
    """Hold the store until nobody wants it any more."""
    store = TCPStore(sys.argv[1], 0, None, True, timedelta(seconds=START), wait_for_workers=False)
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
