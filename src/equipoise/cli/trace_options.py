"""What `advise` and `replay` ask of a routing trace alike: what its file leaves out, and steps."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from equipoise.cli.command import Settings
from equipoise.cli.offline import usage_errors
from equipoise.hal.errors import UsageError
from equipoise.option import Option

if TYPE_CHECKING:
    from equipoise.balancer.formats import CountsTrace, RoutingTrace
    from equipoise.balancer.formats.iterations import IterationRange
    from equipoise.report.replay.steps import StepSource

TRACE = "the trace"
DEFAULT_STEP_TOKENS = 8192
MAX_STEP_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class TraceRequest(Settings):
    """What both commands were asked for; None where it was not given."""

    # fmt: off
    format: Annotated[str | None, Option(
        "format of the file, as the page Formats names it", TRACE, default="as the file looks"
    )] = None
    experts: Annotated[int | None, Option(
        "experts per layer", TRACE, default="as the file says, else its largest id + 1")] = None
    layers: Annotated[int | None, Option(
        "layers of the model, dense ones too: SGLang's responses do not say it", TRACE,
        default="as the file says")] = None
    top_k: Annotated[int | None, Option(
        "experts of a token, likewise", TRACE, default="as the file says")] = None
    step_tokens: Annotated[int | None, Option(
        "tokens of a step over all ranks, where the file holds requests", TRACE,
        least=1, most=MAX_STEP_TOKENS, default=f"{DEFAULT_STEP_TOKENS}")] = None
    phase: Annotated[Literal["prefill", "decode"] | None, Option(
        "how tokens of requests come together: the next tokens, or the next token of each of as "
        "many requests", TRACE, default="prefill")] = None
    # fmt: on


def open_trace(path: Path, request: TraceRequest) -> "CountsTrace | RoutingTrace":
    """Raises UsageError in one line, which names the options that are missing."""
    from equipoise.balancer.formats import read_trace
    from equipoise.balancer.formats.trace_parts import TraceShapeMissing

    with usage_errors():
        try:
            return read_trace(
                path,
                format=request.format,
                layers=request.layers,
                top_k=request.top_k,
                experts=request.experts,
            )
        except TraceShapeMissing as error:
            raise UsageError(f"{error}: give --layers and --top-k") from error


def recorders_of(trace: "CountsTrace | RoutingTrace") -> int | None:
    """How many ranks recorded it, where the file tells."""
    from equipoise.balancer.formats import CountsTrace

    return trace.recorders if isinstance(trace, CountsTrace) else None


def steps_of(
    trace: "CountsTrace | RoutingTrace",
    request: TraceRequest,
    ranks: int,
    during: "IterationRange | None" = None,
) -> "StepSource":
    """The trace as steps on so many ranks, or only some of them.

    Raises UsageError for options that say how requests become steps where the trace has steps.
    """
    from equipoise.balancer.formats import CountsTrace
    from equipoise.balancer.formats.routing_trace import TraceUnit
    from equipoise.report.replay.steps import CountedSteps, Phase, TokenSteps

    first, last = (0, None) if during is None else (during.start, during.stop)
    if isinstance(trace, CountsTrace) or trace.unit is TraceUnit.STEP:
        for flag, value in (("--step-tokens", request.step_tokens), ("--phase", request.phase)):
            if value is not None:
                raise UsageError(f"{flag} is for requests, and the trace holds steps")
    if isinstance(trace, CountsTrace):
        return CountedSteps(trace, first, last)
    tokens, phase = request.step_tokens or DEFAULT_STEP_TOKENS, Phase(request.phase or "prefill")
    return TokenSteps(trace, ranks, tokens, phase, first, last)
