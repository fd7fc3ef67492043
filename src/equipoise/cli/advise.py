"""`equipoise advise`: its options, its checks, and the run from statistics to advice."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli import kinds
from equipoise.cli.files import write_file
from equipoise.cli.offline import (
    MAX_SLOTS,
    check_outputs,
    check_ranks,
    load_placement,
    load_statistics,
    print_written,
    request_values,
    usage_errors,
)
from equipoise.cli.option import Option
from equipoise.cli.progress import part_progress_for
from equipoise.cli.validation import check_count
from equipoise.hal.errors import UsageError

SHAPE, MODEL, MACHINE = "what serves", "what an expert is", "what it runs on"
MEMORY, OUTPUT = "KV cache", "output"

DEFAULT_PRECISION = "fp8"

OPTIONS = (
    Option(key="ranks", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed", help="ranks that serve"),
    Option(key="slots", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of --installed, or as many as are advised",
           help="slots per layer over all ranks, a multiple of them"),
    Option(key="installed", kind=kinds.PATH, group=SHAPE, metavar="FILE",
           shown_default="experts in their order, one replica each",
           help="placement that runs now, in any format"),
    Option(key="target", kind=kinds.REAL, group=SHAPE, metavar="X", shown_default="0.02",
           help="imbalance, max/mean - 1 of the ranks, that is good enough"),
    Option(key="step_rows", kind=kinds.WHOLE, group=SHAPE, metavar="N",
           shown_default="those of a window",
           help="rows of a layer in a step, over all ranks: tokens times experts of a token"),
    Option(key="expert_bytes", kind=kinds.BYTES, group=MODEL, metavar="SIZE",
           shown_default="unknown", help="weights of one expert in one layer, such as 24MiB"),
    Option(key="hidden", kind=kinds.WHOLE, group=MODEL, metavar="N", shown_default="unknown",
           help="width of the model; with --intermediate it says what an expert weighs"),
    Option(key="intermediate", kind=kinds.WHOLE, group=MODEL, metavar="N", shown_default="unknown",
           help="width within an expert, which is three matrices of both widths"),
    Option(key="precision", kind=kinds.PRECISION, group=MODEL, metavar="|".join(kinds.PRECISIONS),
           shown_default=DEFAULT_PRECISION, help="of the weights, and of the products"),
    Option(key="hardware", kind=kinds.NAME, group=MACHINE, metavar="NAME|FILE",
           shown_default="unknown", help="what a rank is: a name of the table that ships, or YAML "
           "or JSON with the same keys; needs what an expert weighs"),
    Option(key="itl", kind=kinds.REAL, group=MACHINE, metavar="MS", shown_default="none",
           help="inter-token latency to keep, in ms: also how long a step is; needs --hardware"),
    Option(key="link", kind=kinds.LINK, group=MACHINE, metavar="|".join(kinds.LINKS),
           shown_default="node", help="what weights come over: within a node, between nodes, or "
           "from the host's memory"),
    Option(key="memory_share", kind=kinds.REAL, group=MACHINE, metavar="X", shown_default="0.8",
           help="part of a device's memory that experts, and KV cache where it is known, may take"),
    Option(key="moe_share", kind=kinds.REAL, group=MACHINE, metavar="X", shown_default="0.5",
           help="part of --itl that the experts of all layers may take"),
    Option(key="dead_zone", kind=kinds.POINTS, group=MACHINE, metavar="R:MS,R:MS,...",
           shown_default="published measurements", help="step times measured at three or more "
           "max/mean of the ranks: up to which imbalance they stay the same is found from them"),
    Option(key="kv_bytes_per_token", kind=kinds.BYTES, group=MEMORY, metavar="SIZE",
           shown_default="unknown", help="KV cache of a token on one rank, all layers; needs what "
           "an expert weighs"),
    Option(key="memory", kind=kinds.BYTES, group=MEMORY, metavar="SIZE",
           shown_default="--memory-share of the hardware's", help="of a rank, for KV cache and "
           "expert weights together: the KV cache memory that the engine prints at its start, and "
           "the expert weights that a rank holds then"),
    Option(key="kv_usage", kind=kinds.REAL, group=MEMORY, metavar="X", shown_default="1.0",
           help="part of the KV cache in use at most, as the engine's metrics say; 1: requests "
           "wait for it"),
    Option(key="json", kind=kinds.PATH, group=OUTPUT, metavar="FILE", shown_default="none",
           help="write the figures there, with the source of each of the hardware's"),
    Option(key="quiet", kind=kinds.SWITCH, group=OUTPUT, shown_default="off",
           help="no names of written files, only the table"),
)  # fmt: skip
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}


@dataclass(frozen=True, kw_only=True)
class AdviseRequest:
    """What one `equipoise advise` was asked for; `progress` is `shown` or `hidden`."""

    statistics: Path
    ranks: int | None = None
    slots: int | None = None
    installed: Path | None = None
    target: float = 0.02
    step_rows: int | None = None
    expert_bytes: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    precision: str | None = None
    hardware: str | None = None
    itl: float | None = None
    link: str | None = None
    memory_share: float | None = None
    moe_share: float | None = None
    dead_zone: tuple[tuple[float, float], ...] | None = None
    kv_bytes_per_token: int | None = None
    memory: int | None = None
    kv_usage: float | None = None
    json: Path | None = None
    progress: str = "shown"

    @property
    def expert_precision(self) -> str:
        """Of weights and products."""
        return self.precision or DEFAULT_PRECISION


if TYPE_CHECKING:
    from equipoise.balancer.formats import ExpertPlacement, ExpertStatistics
    from equipoise.report.advice.advice import Advice
    from equipoise.report.advice.dead_zone import DeadZone
    from equipoise.report.advice.hardware import Expert, Hardware
    from equipoise.report.advice.kv_cache import KvCache

MAX_ROWS = 2**40
MAX_WIDTH = 2**20
MAX_STEP = 3_600_000.0
"""Milliseconds: an hour."""


def advise(arguments: Namespace, command: str) -> int:
    """Read statistics, answer the questions, write the figures, print the table; returns 0.

    Raises UsageError before anything is written.
    """
    from equipoise.report.advice.table import render
    from equipoise.report.terminal import stdout_colour_mode

    request = request_of(vars(arguments))
    _validate(request)
    advice = _advice(request)
    try:
        # Before the table: a closed standard output must not cost the file.
        _write(request, advice, command)
    finally:
        print(render(advice, stdout_colour_mode()), flush=True)
    return 0


def request_of(arguments: Mapping[str, Any]) -> AdviseRequest:
    """What the command line asks for, its configuration file included."""
    return AdviseRequest(**request_values(arguments, BY_KEY))


def _validate(request: AdviseRequest) -> None:
    """Raises UsageError for everything that can be refused without reading a file."""
    if request.ranks is None and request.installed is None:
        raise UsageError("--ranks is needed: there is no --installed to read it from")
    check_ranks(request.ranks)
    for flag, value, most in (
        ("--slots", request.slots, MAX_SLOTS),
        ("--step-rows", request.step_rows, MAX_ROWS),
        ("--hidden", request.hidden, MAX_WIDTH),
        ("--intermediate", request.intermediate, MAX_WIDTH),
    ):
        if value is not None:
            check_count(flag, value, most)
    _check_shares(request)
    _check_company(request)
    inputs = {"STATS": request.statistics}
    if request.installed is not None:
        inputs["--installed"] = request.installed
    check_outputs(inputs, {"--json": request.json})


def _check_shares(request: AdviseRequest) -> None:
    for flag, value in (
        ("--memory-share", request.memory_share),
        ("--moe-share", request.moe_share),
        ("--kv-usage", request.kv_usage),
    ):
        if value is not None and not 0 < value <= 1:
            raise UsageError(f"{flag} must be above 0 and at most 1, got {value:g}")
    if not 0 <= request.target <= 1000:
        raise UsageError(f"--target must be 0 to 1000, got {request.target:g}")
    if request.itl is not None and not 0 < request.itl <= MAX_STEP:
        raise UsageError(f"--itl must be above 0 and at most {MAX_STEP:g}, got {request.itl:g}")


def _check_company(request: AdviseRequest) -> None:
    """Options that say nothing without, or contradict, one another."""
    if (request.hidden is None) != (request.intermediate is None):
        raise UsageError("--hidden and --intermediate go together: both are what an expert weighs")
    if request.hidden is not None and request.expert_bytes is not None:
        raise UsageError("--expert-bytes, or --hidden and --intermediate: they say the same, twice")
    if request.hardware is not None and request.hidden is None and request.expert_bytes is None:
        raise UsageError("--hardware needs --expert-bytes, or --hidden and --intermediate")
    if request.precision is not None and request.hidden is None and request.hardware is None:
        raise UsageError("--precision needs --hidden and --intermediate, or --hardware")
    if request.itl is not None and request.hardware is None:
        raise UsageError("--itl needs --hardware: without it nothing is known of time")
    if request.link is not None and request.hardware is None:
        raise UsageError("--link needs --hardware: without it nothing is known of links")
    if request.memory_share is not None and request.hardware is None:
        raise UsageError("--memory-share needs --hardware: without it nothing is known of memory")
    if request.moe_share is not None and request.itl is None:
        raise UsageError("--moe-share needs --itl, of which it is a part")
    _check_kv_company(request)


def _check_kv_company(request: AdviseRequest) -> None:
    if request.kv_bytes_per_token is None:
        for flag, value in (("--memory", request.memory), ("--kv-usage", request.kv_usage)):
            if value is not None:
                raise UsageError(f"{flag} needs --kv-bytes-per-token")
        return
    if request.hidden is None and request.expert_bytes is None:
        raise UsageError(
            "--kv-bytes-per-token needs --expert-bytes, or --hidden and --intermediate"
        )
    if request.memory is None and request.hardware is None:
        raise UsageError("--kv-bytes-per-token needs --memory, or --hardware to take it from")


def _advice(request: AdviseRequest) -> "Advice":
    from equipoise.report.advice.advice import advise as answers
    from equipoise.report.advice.inputs import AdviceInputs

    hardware = _hardware(request)
    statistics = load_statistics(request.statistics)
    installed = _load_installed(request, statistics)
    ranks = request.ranks if installed is None else installed.ranks
    assert ranks is not None
    _check_slots(request, statistics.experts, ranks)
    question = AdviceInputs(
        statistics=statistics,
        ranks=ranks,
        slots=request.slots,
        installed=installed,
        target=request.target,
        step_rows=request.step_rows,
        expert=_expert(request),
        hardware=hardware,
        latency=None if request.itl is None else request.itl / 1e3,
        kv_cache=_kv_cache(request, hardware),
        dead_zone=_dead_zone(request),
        **_explicit_options(request, "link", "memory_share", "moe_share", "kv_usage"),
    )
    parts = part_progress_for(request.progress, "planning")
    try:
        with usage_errors():
            return answers(question, parts.start_part)
    finally:
        parts.close()


def _explicit_options(request: AdviseRequest, *keys: str) -> dict[str, Any]:
    """Those options that were given; the others are as `AdviceInputs` has them."""
    return {key: value for key in keys if (value := getattr(request, key)) is not None}


def _hardware(request: AdviseRequest) -> "Hardware | None":
    """The hardware, with all figures that are needed: a missing one is refused before reading."""
    if request.hardware is None:
        return None
    from equipoise.report.advice.hardware import find_hardware
    from equipoise.report.advice.inputs import AdviceInputs

    with usage_errors("--hardware"):
        hardware = find_hardware(request.hardware)
        for key in (
            "memory_gb",
            "memory_bandwidth_gbs",
            f"{request.expert_precision}_tflops",
        ):
            hardware.figure(key)
        if request.itl is not None:
            hardware.figure(f"{request.link or AdviceInputs.link}_link_gbs")
    return hardware


def _kv_cache(request: AdviseRequest, hardware: "Hardware | None") -> "KvCache | None":
    from equipoise.report.advice.inputs import AdviceInputs
    from equipoise.report.advice.kv_cache import KvCache

    if request.kv_bytes_per_token is None:
        return None
    memory = request.memory
    if memory is None:
        assert hardware is not None
        memory = int(hardware.memory_bytes * (request.memory_share or AdviceInputs.memory_share))
    return KvCache(request.kv_bytes_per_token, memory)


def _dead_zone(request: AdviseRequest) -> "DeadZone | None":
    from equipoise.report.advice.dead_zone import DeadZone

    if request.dead_zone is None:
        return None
    with usage_errors():
        return DeadZone.fit(request.dead_zone, "--dead-zone")


def _expert(request: AdviseRequest) -> "Expert | None":
    from equipoise.report.advice.hardware import Expert

    if request.expert_bytes is not None:
        return Expert(request.expert_bytes, request.expert_precision)
    if request.hidden is None or request.intermediate is None:
        return None
    return Expert.of_dimensions(request.hidden, request.intermediate, request.expert_precision)


def _load_installed(
    request: AdviseRequest, statistics: "ExpertStatistics"
) -> "ExpertPlacement | None":
    if request.installed is None:
        return None
    from equipoise.report.placement.spread import select_layers

    placement = load_placement("--installed", request.installed, request.ranks)
    with usage_errors(f"--installed: {request.installed}"):
        return select_layers(placement, statistics)


def _check_slots(request: AdviseRequest, experts: int, ranks: int) -> None:
    if request.slots is None:
        return
    if request.slots % ranks:
        raise UsageError(f"--slots {request.slots} is not divisible by {ranks} ranks")
    if not experts <= request.slots <= experts * ranks:
        raise UsageError(
            f"--slots must be {experts} to {experts * ranks}, from one copy of each expert to one "
            f"on every rank, got {request.slots}"
        )


def _write(request: AdviseRequest, advice: "Advice", command: str) -> None:
    from equipoise.report.advice.json_output import to_json

    if request.json is None:
        return
    about = {"command": command, "statistics": str(request.statistics)}
    text = json.dumps(about | to_json(advice), indent=2, allow_nan=False)
    place = write_file(request.json, text + "\n")
    print_written(request.progress, [f"figures: {place}"])
