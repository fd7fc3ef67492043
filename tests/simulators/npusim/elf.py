"""What a shared library needs from others, and what it gives."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npusim.errors import Refused

FIRST_VERSION = 2
"""Version indices below this one mean "no version"."""


@contextmanager
def _open_elf(path: Path) -> Iterator[Any]:
    try:  # not a plain import: type checks run where it is not installed
        reader = importlib.import_module("elftools.elf.elffile")
    except ImportError:
        raise Refused("pyelftools is not installed: pip install pyelftools") from None
    with path.open("rb") as file:
        yield reader.ELFFile(file)


def needed(path: Path) -> set[str]:
    """Undefined symbols that must be found at load.

    Without weak ones, and without versioned ones: only the libraries of the system (C, C++, the
    compiler's) give versions to their symbols.
    """
    with _open_elf(path) as elf:
        versions = elf.get_section_by_name(".gnu.version")
        return {
            symbol.name
            for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and not _versioned(versions, index)
        }


def provided(path: Path, names: set[str]) -> set[str]:
    """Which of `names` the library defines; by its hash table, for libtorch_cpu is large."""
    with _open_elf(path) as elf:
        table = elf.get_section_by_name(".gnu.hash")
        if table is None:
            table = elf.get_section_by_name(".hash")
        return {name for name in names if _defines(table.get_symbol(name))}


def weak(path: Path, names: set[str]) -> set[str]:
    """Which of `names` the library defines weakly."""
    with _open_elf(path) as elf:
        return {
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol.name in names and symbol["st_info"]["bind"] == "STB_WEAK"
        }


def _versioned(versions: Any, index: int) -> bool:
    if versions is None:
        return False
    version = versions.get_symbol(index)["ndx"]
    return isinstance(version, int) and version >= FIRST_VERSION


def _defines(symbol: Any) -> bool:
    return symbol is not None and symbol["st_shndx"] != "SHN_UNDEF"
