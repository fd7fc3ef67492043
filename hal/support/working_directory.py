"""Where PACKAGE:OBJECT of a command line is looked for besides the installed packages."""

import os
import sys


def search_working_directory() -> None:
    """Let PACKAGE:OBJECT lie in the working directory, after all else, as `python -m` does.

    The script of a command does not look there, and neither does a file of a violation.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
