"""`python -m equipoise` and the command `equipoise`."""

import sys

from equipoise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
