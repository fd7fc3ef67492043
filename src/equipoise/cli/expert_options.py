"""Options that say what an expert weighs and what a rank is, for `advise` and `replay`."""

from typing import TYPE_CHECKING, Protocol

from equipoise.cli.offline import usage_errors
from equipoise.hal.errors import UsageError

if TYPE_CHECKING:
    from equipoise.report.advice.hardware import Expert, Hardware

DEFAULT_PRECISION = "fp8"


class ExpertRequest(Protocol):
    """What a command was asked for."""

    @property
    def expert_bytes(self) -> int | None:
        """Weights of an expert in a layer."""

    @property
    def hidden(self) -> int | None:
        """Width of the model."""

    @property
    def intermediate(self) -> int | None:
        """Width within an expert."""

    @property
    def precision(self) -> str | None:
        """Of weights and products."""

    @property
    def hardware(self) -> str | None:
        """A name or a file."""


def check_expert(request: ExpertRequest) -> None:
    """Raises UsageError for options that say nothing without, or contradict, one another."""
    if (request.hidden is None) != (request.intermediate is None):
        raise UsageError("--hidden and --intermediate go together: both are what an expert weighs")
    if request.hidden is not None and request.expert_bytes is not None:
        raise UsageError("--expert-bytes, or --hidden and --intermediate: they say the same, twice")
    if request.hardware is not None and request.hidden is None and request.expert_bytes is None:
        raise UsageError("--hardware needs --expert-bytes, or --hidden and --intermediate")
    if request.precision is not None and request.hidden is None and request.hardware is None:
        raise UsageError("--precision needs --hidden and --intermediate, or --hardware")


def expert_of(request: ExpertRequest) -> "Expert | None":
    """What an expert is; None where nothing says it."""
    from equipoise.report.advice.hardware import Expert

    precision = request.precision or DEFAULT_PRECISION
    if request.expert_bytes is not None:
        return Expert(request.expert_bytes, precision)
    if request.hidden is None or request.intermediate is None:
        return None
    return Expert.of_dimensions(request.hidden, request.intermediate, precision)


def hardware_of(request: ExpertRequest, link: str | None) -> "Hardware | None":
    """The hardware, with all figures that are needed: a missing one is refused before reading.

    `link` is what weights move over, None where that does not matter. Raises UsageError.
    """
    if request.hardware is None:
        return None
    from equipoise.report.advice.hardware import find_hardware

    precision = request.precision or DEFAULT_PRECISION
    with usage_errors("--hardware"):
        hardware = find_hardware(request.hardware)
        for key in ("memory_gb", "memory_bandwidth_gbs", f"{precision}_tflops"):
            hardware.figure(key)
        if link is not None:
            hardware.figure(f"{link}_link_gbs")
    return hardware
