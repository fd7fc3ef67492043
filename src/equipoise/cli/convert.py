"""`equipoise convert`: its options, and the conversion of statistics or placements."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.balancer.formats.format_names import PLACEMENT_FORMAT_NAMES, STATISTICS_FORMAT_NAMES
from equipoise.cli import kinds
from equipoise.cli.files import describe_path, ensure_folder
from equipoise.cli.offline import (
    check_ranks,
    naming_ranks_option,
    print_written,
    request_values,
    usage_errors,
    warn,
    warn_of_dropped_layers,
)
from equipoise.cli.option import Option
from equipoise.cli.option_checks import check_folder
from equipoise.hal.errors import UsageError

FILES = "files"

OPTIONS = (
    Option(key="format", kind=kinds.NAME, group=FILES, metavar="NAME",
           shown_default="as the suffix says, none is a folder",
           help=f"format of OUT; statistics: {', '.join(STATISTICS_FORMAT_NAMES)}; placements: "
           f"{', '.join(PLACEMENT_FORMAT_NAMES)}"),
    Option(key="ranks", kind=kinds.WHOLE, group=FILES, metavar="N", shown_default="as IN says",
           help="IN is a placement for so many ranks: needed where it does not say it"),
    Option(key="quiet", kind=kinds.SWITCH, group=FILES, shown_default="off",
           help="say nothing of what was read and written"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class ConvertRequest:
    """What one `equipoise convert` was asked for; `progress` is `shown` or `hidden`."""

    source: Path
    out: Path
    format: str | None = None
    ranks: int | None = None
    progress: str = "shown"


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics


SHARED = {"vllm": "vllm or sglang"}
"""Formats of two engines."""


def convert(arguments: Namespace, command: str) -> int:
    """Read, write, say what was lost; returns 0. Raises UsageError before anything is written."""
    from equipoise.balancer import formats

    request = request_of(vars(arguments))
    check_ranks(request.ranks)
    if os.path.realpath(request.source) == os.path.realpath(request.out):
        raise UsageError(f"OUT: {request.out} is the file that IN is read from")
    check_folder("OUT", request.out.parent)
    contents = _read(request)
    if not isinstance(contents, formats.ExpertPlacement):
        warn_of_dropped_layers(request.source, contents)
    place = describe_path(request.out)
    loss = _write(request, contents)
    if loss:
        warn(f"{request.out}: {loss}")
    print_written(request.progress, [f"{_origin(contents.source)} -> {place}"])
    return 0


def _origin(origin: str) -> str:
    """Names both formats where one field could be of either: SGLang's map has vLLM's field."""
    form, colon, path = origin.partition(": ")
    return f"{SHARED.get(form, form)}{colon}{path}"


def request_of(arguments: Mapping[str, Any]) -> ConvertRequest:
    """What the command line asks for, its configuration file included."""
    return ConvertRequest(**request_values(arguments, BY_KEY))


def _read(request: ConvertRequest) -> "ExpertStatistics | ExpertPlacement":
    from equipoise.balancer.formats import read_either

    with usage_errors(), naming_ranks_option():
        return read_either(request.source, ranks=request.ranks)


def _write(request: ConvertRequest, contents: "ExpertStatistics | ExpertPlacement") -> str | None:
    """What was lost, in words, or None."""
    from equipoise.balancer import formats

    is_statistics = isinstance(contents, formats.ExpertStatistics)
    choose = formats.statistics_format if is_statistics else formats.placement_format
    with usage_errors(f"{request.source} holds {'statistics' if is_statistics else 'a placement'}"):
        choose(request.out, request.format)
    ensure_folder(request.out.parent)
    with usage_errors():
        if isinstance(contents, formats.ExpertStatistics):
            return formats.write_statistics(request.out, contents, request.format)
        return formats.write_placement(request.out, contents, request.format)
