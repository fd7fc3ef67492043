"""CSV with a header, in blocks of columns; fields are not quoted in any of the traces."""

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.balancer.formats.numbers import short
from equipoise.balancer.requests.block_hashes import Counts
from equipoise.balancer.requests.traces.column import Bytes, Column
from equipoise.balancer.requests.traces.source import Block, Source

NEWLINE, RETURN, COMMA = b"\n\r,"


def header(head: bytes) -> list[str]:
    """Names in the first line of a file that begins so."""
    line = head.partition(b"\n")[0][:1000]
    return [name.strip() for name in line.decode(errors="replace").split(",")]


def read_columns(
    source: Source, names: Sequence[str], most: int | None
) -> Iterator[tuple[Column, ...]]:
    """The columns `names`, block by block, of the first `most` rows; None: of all.

    Other columns may stand between them, in any order: releases of one trace differ in those. Empty
    lines are no rows. Raises `FormatError`: a name is missing, a row has more or fewer columns.
    """
    found = header(source.head)
    missing = [name for name in names if found.count(name) != 1]
    if missing:
        begins = short(",".join(found))
        raise source.error(f"begins with {begins}, expected columns {', '.join(names)}", 1)
    left = most
    for block in source.blocks():
        table = _Table(source, block, left)
        if table.rows:
            yield tuple(table.column(name, found.index(name), len(found)) for name in names)
        left = None if left is None else left - table.rows
        if left == 0:
            return


class _Table:
    """The lines of a block without the header and the empty ones; `most` of them."""

    def __init__(self, source: Source, block: Block, most: int | None) -> None:
        self._source = source
        self._data: Bytes = np.frombuffer(block.data, dtype=np.uint8)
        ends = np.append(np.flatnonzero(self._data == NEWLINE), self._data.size)
        begins = np.append(0, ends[:-1] + 1)
        if self._data.size:
            ends = ends - ((ends > begins) & (self._data[ends - 1] == RETURN))
        lines = block.first + np.arange(ends.size)
        kept = np.flatnonzero((ends > begins) & (lines > 1))[:most]
        self._begins, self._ends = begins[kept], ends[kept]
        self._lines = lines[kept]
        self._commas: Counts | None = None

    @property
    def rows(self) -> int:
        """How many."""
        return self._begins.size

    def column(self, name: str, at: int, width: int) -> Column:
        """Column `at` of `width`."""
        commas = self._split(width)
        begins = self._begins if at == 0 else commas[:, at - 1] + 1
        ends = self._ends if at == width - 1 else commas[:, at]
        return Column(self._source.path, name, self._data, begins, ends, self._lines)

    def _split(self, width: int) -> Counts:
        """int64 [rows, width - 1]: where the commas are."""
        if self._commas is None:
            commas = np.flatnonzero(self._data == COMMA)
            first, last = (np.searchsorted(commas, at) for at in (self._begins, self._ends))
            wrong = np.flatnonzero(last - first != width - 1)
            if wrong.size:
                columns = last[wrong[0]] - first[wrong[0]] + 1
                raise self._source.error(
                    f"has {columns} columns, expected {width}", int(self._lines[wrong[0]])
                )
            self._commas = commas[first[:, None] + np.arange(width - 1)]
        return self._commas
