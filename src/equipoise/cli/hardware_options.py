"""What `advise` and `replay` ask alike: what an expert weighs, what a rank is, its KV cache."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from equipoise.byte_sizes import BYTES
from equipoise.cli import kinds
from equipoise.cli.command import Settings
from equipoise.cli.offline import usage_errors
from equipoise.hal.errors import UsageError
from equipoise.option import Option

if TYPE_CHECKING:
    from equipoise.report.advice.dead_zone import DeadZone
    from equipoise.report.advice.hardware import Expert, Hardware
    from equipoise.report.advice.kv_cache import KvCache

MODEL, MACHINE, MEMORY = "what an expert is", "what it runs on", "KV cache"
DEFAULT_PRECISION = "fp8"
DEFAULT_LINK = "node"
DEFAULT_MEMORY_SHARE = 0.8
MAX_WIDTH = 2**20
MAX_STEP = 3_600_000.0
"""Milliseconds: an hour."""


@dataclass(frozen=True, kw_only=True)
class HardwareRequest(Settings):
    """What both commands were asked for; None where it was not given."""

    # fmt: off
    expert_bytes: Annotated[int | None, Option(
        "weights of one expert in one layer, such as 24MiB", MODEL,
        kind=BYTES, default="unknown")] = None
    hidden: Annotated[int | None, Option(
        "width of the model; with --intermediate it says what an expert weighs", MODEL,
        least=1, most=MAX_WIDTH, default="unknown")] = None
    intermediate: Annotated[int | None, Option(
        "width within an expert, which is three matrices of both widths", MODEL,
        least=1, most=MAX_WIDTH, default="unknown")] = None
    precision: Annotated[Literal["bf16", "fp8", "fp4"] | None, Option(
        "of the weights, and of the products", MODEL, default=DEFAULT_PRECISION)] = None
    hardware: Annotated[str | None, Option(
        "what a rank is: a name of the table that ships, or YAML or JSON with the same keys; "
        "needs what an expert weighs", MACHINE, metavar="NAME|FILE", default="unknown")] = None
    link: Annotated[Literal["node", "network", "host"] | None, Option(
        "what weights come over: within a node, between nodes, or from the host's memory",
        MACHINE, needs=("hardware", "without it nothing is known of links"), default=DEFAULT_LINK,
    )] = None
    itl: Annotated[float | None, Option(
        "a step without a balancer, in ms, as measured", MACHINE,
        least=0, above=True, most=MAX_STEP, metavar="MS", default="unknown")] = None
    dead_zone: Annotated[tuple[tuple[float, float], ...] | None, Option(
        "step times measured at three or more max/mean of the ranks: up to which imbalance they "
        "stay the same is found from them", MACHINE, kind=kinds.POINTS,
        default="published measurements", rare=True)] = None
    kv_bytes_per_token: Annotated[int | None, Option(
        "KV cache of a token on one rank, all layers; needs what an expert weighs", MEMORY,
        kind=BYTES, default="unknown")] = None
    memory: Annotated[int | None, Option(
        "of a rank, for KV cache and expert weights together: the KV cache memory that the engine "
        "prints at its start, and the expert weights that a rank holds then", MEMORY,
        kind=BYTES, needs=("kv_bytes_per_token", "it is for KV cache and weights together"),
        default="--memory-share of the hardware's")] = None
    memory_share: Annotated[float | None, Option(
        "part of a device's memory that experts, and KV cache where it is known, may take", MEMORY,
        needs=("hardware", "without it nothing is known of memory"),
        least=0, above=True, most=1, default=f"{DEFAULT_MEMORY_SHARE}")] = None
    kv_usage: Annotated[float | None, Option(
        "part of the KV cache in use at most, as the engine's metrics say; 1: requests wait for "
        "it", MEMORY, needs=("kv_bytes_per_token", "it is a part of the KV cache"),
        least=0, above=True, most=1, default="1.0")] = None
    # fmt: on


def check_hardware(request: HardwareRequest) -> None:
    """Raises UsageError for options that say nothing without another."""
    _check_expert(request)
    _check_kv_cache(request)


def _check_expert(request: HardwareRequest) -> None:
    if (request.hidden is None) != (request.intermediate is None):
        raise UsageError("--hidden and --intermediate go together: both are what an expert weighs")
    if request.hidden is not None and request.expert_bytes is not None:
        raise UsageError("--expert-bytes, or --hidden and --intermediate: they say the same, twice")
    if request.hardware is not None and request.hidden is None and request.expert_bytes is None:
        raise UsageError("--hardware needs --expert-bytes, or --hidden and --intermediate")
    if request.precision is not None and request.hidden is None and request.hardware is None:
        raise UsageError("--precision needs --hidden and --intermediate, or --hardware")


def _check_kv_cache(request: HardwareRequest) -> None:
    if request.kv_bytes_per_token is None:
        return
    if request.hidden is None and request.expert_bytes is None:
        raise UsageError(
            "--kv-bytes-per-token needs --expert-bytes, or --hidden and --intermediate"
        )
    if request.memory is None and request.hardware is None:
        raise UsageError("--kv-bytes-per-token needs --memory, or --hardware to take it from")


def precision_of(request: HardwareRequest) -> str:
    """Of weights and products."""
    return request.precision or DEFAULT_PRECISION


def expert_of(request: HardwareRequest) -> "Expert | None":
    """What an expert is; None where nothing says it."""
    from equipoise.report.advice.hardware import Expert

    if request.expert_bytes is not None:
        return Expert(request.expert_bytes, precision_of(request))
    if request.hidden is None or request.intermediate is None:
        return None
    return Expert.of_dimensions(request.hidden, request.intermediate, precision_of(request))


def hardware_of(request: HardwareRequest, moves: bool) -> "Hardware | None":
    """The hardware, with all figures that are needed: a missing one is refused before reading.

    `moves`: whether weights move over its link. Raises UsageError.
    """
    if request.hardware is None:
        return None
    from equipoise.report.advice.hardware import find_hardware

    with usage_errors("--hardware"):
        hardware = find_hardware(request.hardware)
        for key in ("memory_gb", "memory_bandwidth_gbs"):
            hardware.figure(key)
        hardware.operations_per_second(precision_of(request))
        if moves:
            hardware.figure(f"{request.link or DEFAULT_LINK}_link_gbs")
    return hardware


def kv_cache_of(request: HardwareRequest, hardware: "Hardware | None") -> "KvCache | None":
    """The memory that weights and KV cache share; None where nothing says it."""
    from equipoise.report.advice.kv_cache import KvCache

    if request.kv_bytes_per_token is None:
        return None
    memory = request.memory
    if memory is None:
        assert hardware is not None
        share = DEFAULT_MEMORY_SHARE if request.memory_share is None else request.memory_share
        memory = int(hardware.memory_bytes * share)
    return KvCache(request.kv_bytes_per_token, memory)


def dead_zone_of(request: HardwareRequest) -> "DeadZone | None":
    """As measured; None where it was not."""
    from equipoise.report.advice.dead_zone import DeadZone

    if request.dead_zone is None:
        return None
    with usage_errors():
        return DeadZone.fit(request.dead_zone, "--dead-zone")


def check_slots(slots: int, experts: int, ranks: int) -> None:
    """Raises UsageError unless ranks can hold every expert in so many slots of a layer."""
    if slots % ranks:
        raise UsageError(f"--slots {slots} is not divisible by {ranks} ranks")
    if not experts <= slots <= experts * ranks:
        raise UsageError(
            f"--slots must be {experts} to {experts * ranks}, from one copy of each expert to one "
            f"on every rank, got {slots}"
        )
