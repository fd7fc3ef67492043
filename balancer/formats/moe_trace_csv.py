"""Reads expert ids by token from CSV: the columns `token`, `layer`, `rank`, `expert`.

`rank` is the place among the token's experts. `phase`, `prefill` or `decode`, and `request` may be
there; rows of a request are consecutive, in any order. `phase,token,layer,rank,expert` is what
llama.cpp's example `moe-trace` writes in the fork Cartaz/llama.cpp-vulkan-moe
(`examples/moe-trace/README.md` and `moe-trace.cpp` at 9149912a). The example that is proposed to
llama.cpp itself (pull request 28544, open in September 2026) writes `layer,expert` only: a token
cannot be told from the next, so it is refused.

llama.cpp runs its last layer only for tokens whose output is asked for: the others have no expert
there.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.files import open_file
from equipoise.balancer.formats.numbers import MAX_LAYERS, short_repr
from equipoise.balancer.formats.routing_trace import MAX_EXPERTS, NO_EXPERT
from equipoise.balancer.formats.trace_parts import RawPart
from equipoise.hal.errors import FormatError

NUMBER_COLUMNS = {"token": 1 << 40, "layer": MAX_LAYERS, "rank": MAX_EXPERTS, "expert": MAX_EXPERTS}
"""With the limit of each, which itself is out of range."""
TEXT_COLUMNS = "phase", "request"
PHASES = "prefill", "decode"
MAX_DIGITS = 13
MAX_EMPTY_PER_ROW = 16
"""Most ids that are missing for each that is there: a few rows must not claim any memory."""


@dataclass
class _Rows:
    """The rows of one request, column by column; `line` is where the first one is."""

    request: str | None
    line: int
    numbers: dict[str, list[int]] = field(
        default_factory=lambda: {name: [] for name in NUMBER_COLUMNS}
    )
    prompt: list[bool] = field(default_factory=list)


def is_moe_trace(path: Path) -> bool:
    """Returns whether the first line names routing by token. Raises `FormatError`."""
    with open_file(path) as stream:
        header = stream.readline(4096).decode("utf-8", "replace")
    names = {name.strip() for name in header.removeprefix("\ufeff").split(",")}
    return "expert" in names and "count" not in names


def open_parts(
    path: Path, experts: int | None
) -> tuple[Callable[[], Iterator[RawPart]], int | None, tuple[int, ...]]:
    """Returns what reads a part for each request, `experts`, and the numbers of the layers.

    The file is read once, for the layers and the experts per token. Raises `FormatError`.
    """
    layers: set[int] = set()
    top_k = 0
    for rows in _requests(path):
        layers.update(rows.numbers["layer"])
        top_k = max(top_k, max(rows.numbers["rank"]) + 1)
    if not layers:
        raise FormatError(str(path), "has no rows")
    numbers = tuple(sorted(layers))

    def read() -> Iterator[RawPart]:
        for rows in _requests(path):
            yield _part(path, rows, numbers, top_k)

    return read, experts, numbers


def _part(path: Path, rows: _Rows, layers: tuple[int, ...], top_k: int) -> RawPart:
    columns = {name: np.array(column) for name, column in rows.numbers.items()}
    tokens, at = np.unique(columns["token"], return_inverse=True)
    shape = len(tokens), len(layers), top_k
    where = f"request {short_repr(rows.request)}" if rows.request is not None else ""
    cells = shape[0] * shape[1] * shape[2]
    found = len(columns["token"])
    problem = RawPart(path, where, np.zeros(0, dtype=np.int32), request=rows.request)
    if cells > found * MAX_EMPTY_PER_ROW:
        raise problem.error(
            f"has {found} rows for {shape[0]} tokens, {shape[1]} layers and {top_k} places"
        )
    layer = np.searchsorted(layers, columns["layer"])
    flat = np.ravel_multi_index((at, layer, columns["rank"]), shape)
    unique, first, times = np.unique(flat, return_index=True, return_counts=True)
    if len(unique) != found:
        row = first[times > 1][0]
        token, number, place = (int(columns[name][row]) for name in ("token", "layer", "rank"))
        raise problem.error(f"token {token}, layer {number}, rank {place} is given twice")
    ids = np.full(cells, NO_EXPERT, dtype=np.int32)
    ids[flat] = columns["expert"]
    return RawPart(
        path,
        where,
        ids.reshape(shape),
        request=rows.request,
        prompt_tokens=_prompt_tokens(problem, rows, columns["token"]),
    )


def _prompt_tokens(problem: RawPart, rows: _Rows, tokens: npt.NDArray[np.int64]) -> int | None:
    if not rows.prompt:
        return None
    prompt = np.array(rows.prompt)
    first, rest = tokens[prompt], tokens[~prompt]
    if first.size and rest.size and first.max() >= rest.min():
        raise problem.error(f"token {first.max()} of prefill does not come before decode")
    return len(np.unique(first))


def _requests(path: Path) -> Iterator[_Rows]:
    """Reads the file request by request."""
    with open_file(path) as stream:
        text = TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header)
            rows: _Rows | None = None
            finished: set[str | None] = set()
            for row in filter(None, reader):
                line = reader.line_num
                if len(row) != len(header):
                    problem = f"line {line} has {len(row)} columns of {len(header)}"
                    raise FormatError(str(path), problem)
                values = dict(zip(header, (value.strip() for value in row), strict=True))
                request = values.get("request")
                if rows is None or rows.request != request:
                    if rows is not None:
                        yield rows
                        finished.add(rows.request)
                    if request in finished:
                        problem = f"line {line}: request {short_repr(request)} goes on after others"
                        raise FormatError(str(path), problem)
                    rows = _Rows(request, line)
                _add(path, line, rows, values)
            if rows is not None:
                yield rows
        except csv.Error as error:
            problem = f"line {reader.line_num} is not CSV: {error}"
            raise FormatError(str(path), problem) from None
        except UnicodeDecodeError as error:
            raise FormatError(str(path), f"is not UTF-8 at byte {error.start}") from None


def _add(path: Path, line: int, rows: _Rows, values: dict[str, str]) -> None:
    for name, limit in NUMBER_COLUMNS.items():
        text = values[name]
        # Checked before `int`, which takes quadratic time in the number of digits.
        number = int(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else None
        if number is None or number >= limit:
            problem = f"line {line}: {name} is {short_repr(text)}, not a whole number below {limit}"
            raise FormatError(str(path), problem)
        rows.numbers[name].append(number)
    if "phase" in values:
        if values["phase"] not in PHASES:
            problem = f"line {line}: phase is {short_repr(values['phase'])}, not prefill or decode"
            raise FormatError(str(path), problem)
        rows.prompt.append(values["phase"] == PHASES[0])


def _check_header(path: Path, header: list[str]) -> None:
    if len(set(header)) != len(header):
        raise FormatError(str(path), f"has a column twice: {short_repr(header)}")
    missing = [name for name in NUMBER_COLUMNS if name not in header]
    unknown = [name for name in header if name not in (*NUMBER_COLUMNS, *TEXT_COLUMNS)]
    if missing:
        raise FormatError(str(path), f"has no column {', '.join(missing)}: only {','.join(header)}")
    if unknown:
        raise FormatError(str(path), f"has the column {short_repr(unknown[0])}, which is not known")
