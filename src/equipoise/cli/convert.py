"""`equipoise convert`: its options, and the conversion of statistics or placements."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from equipoise.balancer.formats.format_names import PLACEMENT_FORMAT_NAMES, STATISTICS_FORMAT_NAMES
from equipoise.cli.command import Command, Settings
from equipoise.cli.files import describe_path, ensure_folder
from equipoise.cli.offline import (
    MAX_RANKS,
    count_routed_experts,
    naming_ranks_option,
    print_written,
    usage_errors,
    warn,
    warn_of_dropped_layers,
)
from equipoise.cli.option_checks import check_folder
from equipoise.hal.errors import UsageError
from equipoise.option import Argument, Option

FILES = "files"
CONVERT = """\
Read statistics or a placement, whichever IN is, and write it in another format.
What the format of OUT cannot carry is listed on standard error."""
EXAMPLES = """\
examples:
  equipoise convert placement.json moe_load_balancer.yaml
  equipoise convert recorded/ counts.csv
  equipoise convert map.npy placement.json --ranks 32

exit code: 0 written, 2 bad input, nothing was written, 3 it could not be written"""


@dataclass(frozen=True, kw_only=True)
class ConvertRequest(Settings):
    """What one `equipoise convert` was asked for."""

    # fmt: off
    source: Annotated[Path, Argument("IN", "what to read")]
    out: Annotated[Path, Argument("OUT", "what to write")]
    format: Annotated[str | None, Option(
        f"format of OUT; statistics: {', '.join(STATISTICS_FORMAT_NAMES)}; placements: "
        f"{', '.join(PLACEMENT_FORMAT_NAMES)}", FILES,
        default="as the suffix says, none is a folder")] = None
    ranks: Annotated[int | None, Option(
        "IN is a placement for so many ranks: needed where it does not say it", FILES,
        least=1, most=MAX_RANKS, default="as IN says")] = None
    # fmt: on


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics


SHARED = {"vllm": "vllm or sglang"}
"""Formats of two engines."""


def convert(request: ConvertRequest, command: str) -> int:
    """Read, write, say what was lost; returns 0. Raises UsageError before anything is written."""
    from equipoise.balancer import formats

    if os.path.realpath(request.source) == os.path.realpath(request.out):
        raise UsageError(f"OUT: {request.out} is the file that IN is read from")
    check_folder("OUT", request.out.parent)
    contents = _read(request)
    if not isinstance(contents, formats.ExpertPlacement):
        warn_of_dropped_layers(request.source, contents.empty_layers)
    place = describe_path(request.out)
    target, loss = _write(request, contents)
    if loss:
        warn(f"{request.out}: {loss}")
    print_written(request.progress, [f"{_origin(contents.source)} -> {place} ({target})"])
    return 0


def _origin(origin: str) -> str:
    """Names both formats where one field could be of either: SGLang's map has vLLM's field."""
    form, _, path = origin.partition(": ")
    return f"{path} ({SHARED.get(form, form)})"


def _read(request: ConvertRequest) -> "ExpertStatistics | ExpertPlacement":
    from equipoise.balancer.formats import read_either

    if request.ranks is None and (counts := count_routed_experts(request.source)) is not None:
        return counts
    with usage_errors(), naming_ranks_option():
        return read_either(request.source, ranks=request.ranks)


def _write(
    request: ConvertRequest, contents: "ExpertStatistics | ExpertPlacement"
) -> tuple[str, str | None]:
    """Name of the format, and what was lost, in words, or None."""
    from equipoise.balancer import formats

    is_statistics = isinstance(contents, formats.ExpertStatistics)
    choose = formats.statistics_format if is_statistics else formats.placement_format
    with usage_errors(f"{request.source} holds {'statistics' if is_statistics else 'a placement'}"):
        target = choose(request.out, request.format).name
    ensure_folder(request.out.parent)
    with usage_errors():
        if isinstance(contents, formats.ExpertStatistics):
            return target, formats.write_statistics(request.out, contents, request.format)
        return target, formats.write_placement(request.out, contents, request.format)


COMMAND = Command(ConvertRequest, convert, description=CONVERT, examples=EXAMPLES)
