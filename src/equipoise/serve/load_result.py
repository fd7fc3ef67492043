"""Figures of a load run, and the table of `equipoise bench serve`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from equipoise.report.terminal import ColourMode, TextStyle, styled


@dataclass
class SentRequest:
    """One request, while and after it lasts; times are the event loop's, in seconds.

    Attributes:
        number: its place.
        late: seconds by which it was sent after its time: the client itself did not keep up.
        begin: when it was sent.
        first: when its first token came; None: none did.
        end: when it was over.
        gaps: seconds from one arrival of tokens to the next.
        prompt: tokens, as the server says; 0: it does not say.
        output: tokens.
        failure: why it is not answered; None: it is.
    """

    number: int
    late: float
    begin: float
    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    output: int = 0
    failure: str | None = None


@dataclass(frozen=True)
class LatencyStats:
    """Of a set of seconds; interpolated percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "LatencyStats | None":
        """None of nothing."""
        if not seconds:
            return None
        values = np.asarray(seconds)
        half, high, highest = (float(one) for one in np.percentile(values, [50, 90, 99]))
        return LatencyStats(float(values.mean()), half, high, highest, float(values.max()))


@dataclass(frozen=True)
class LoadResult:
    """Of all requests; None where nothing is known.

    Attributes:
        requests: that were sent.
        answered: of them.
        failures: of the others, how many by kind.
        seconds: from the first one's sending to the last one's end.
        prompt_tokens: of answered requests.
        output_tokens: of answered requests.
        ttft: time to first token.
        tpot: time per output token after the first, mean of each request.
        itl: inter-token latency, each gap for itself.
        latency: from sending to end.
        late: by how much the client was later than its own plan.
    """

    requests: int
    answered: int
    failures: Mapping[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft: LatencyStats | None
    tpot: LatencyStats | None
    itl: LatencyStats | None
    latency: LatencyStats | None
    late: LatencyStats | None

    @property
    def rates(self) -> dict[str, float]:
        """By second."""
        seconds = max(self.seconds, 1e-9)
        return {
            "requests_per_second": self.answered / seconds,
            "output_tokens_per_second": self.output_tokens / seconds,
            "tokens_per_second": (self.prompt_tokens + self.output_tokens) / seconds,
        }

    def to_json(self) -> dict[str, object]:
        """For `--json`; all times in seconds."""
        return {**asdict(self), "failures": dict(self.failures), **self.rates}


def load_result_of(sent: Sequence[SentRequest]) -> LoadResult:
    """Figures of requests that are over."""
    good = [one for one in sent if one.failure is None]
    answers = [(one, one.first) for one in good if one.first is not None]
    failures = Counter(one.failure for one in sent if one.failure is not None)
    span = max(one.end for one in sent) - min(one.begin for one in sent) if sent else 0.0
    return LoadResult(
        requests=len(sent),
        answered=len(good),
        failures=dict(sorted(failures.items())),
        seconds=span,
        prompt_tokens=sum(one.prompt for one in good),
        output_tokens=sum(one.output for one in good),
        ttft=LatencyStats.of([first - one.begin for one, first in answers]),
        tpot=LatencyStats.of(
            [(one.end - first) / (one.output - 1) for one, first in answers if one.output > 1]
        ),
        itl=LatencyStats.of([gap for one in good for gap in one.gaps]),
        latency=LatencyStats.of([one.end - one.begin for one in good]),
        late=LatencyStats.of([one.late for one in sent]),
    )


ROWS = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("inter-token latency", "itl"),
    ("latency", "latency"),
    ("sent late", "late"),
)
WIDTH = 80


def render(result: LoadResult, colour_mode: ColourMode) -> str:
    """All times in milliseconds; no line is wider than `WIDTH`."""
    rates = result.rates
    lines = [
        styled(
            f"{result.answered} of {result.requests} requests answered", TextStyle.BOLD, colour_mode
        ),
        f"{result.seconds:.2f} s, {rates['requests_per_second']:.2f} requests/s, "
        f"{rates['output_tokens_per_second']:,.1f} output tokens/s",
        f"{result.prompt_tokens:,} prompt tokens, {result.output_tokens:,} output tokens",
        "",
        f"{'milliseconds':<23}{'mean':>11}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}",
        *(_row(name, getattr(result, key)) for name, key in ROWS),
    ]
    if result.failures:
        lines += [
            "",
            *(_failure_line(kind, count, colour_mode) for kind, count in result.failures.items()),
        ]
    return "\n".join(lines)


def _row(name: str, spread: LatencyStats | None) -> str:
    if spread is None:
        return f"{name:<23}{'-':>11}"
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
    return f"{name:<23}" + "".join(f"{value * 1000:>11,.2f}" for value in values)


def _failure_line(kind: str, count: int, colour_mode: ColourMode) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in kind)
    return styled(f"failed: {count} x {text}"[:WIDTH], TextStyle.RED, colour_mode)
