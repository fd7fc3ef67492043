"""The table that `equipoise bench serve` ends with."""

from equipoise.report.ink import Ink, Tint, paint
from equipoise.serve.load_result import LoadResult, Spread

ROWS = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("inter-token latency", "itl"),
    ("latency", "latency"),
    ("sent late", "late"),
)
WIDTH = 80


def render(result: LoadResult, ink: Ink) -> str:
    """All times in milliseconds; no line is wider than `WIDTH`."""
    rates = result.rates
    lines = [
        paint(f"{result.answered} of {result.requests} requests answered", Tint.BOLD, ink),
        f"{result.seconds:.2f} s, {rates['requests_per_second']:.2f} requests/s, "
        f"{rates['output_tokens_per_second']:,.1f} output tokens/s",
        f"{result.prompt_tokens:,} prompt tokens, {result.output_tokens:,} output tokens",
        "",
        f"{'milliseconds':<23}{'mean':>11}{'p50':>11}{'p90':>11}{'p99':>11}{'max':>11}",
        *(_row(name, getattr(result, key)) for name, key in ROWS),
    ]
    if result.failures:
        lines += ["", *(_failed(kind, count, ink) for kind, count in result.failures.items())]
    return "\n".join(lines)


def _row(name: str, spread: Spread | None) -> str:
    if spread is None:
        return f"{name:<23}{'-':>11}"
    values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
    return f"{name:<23}" + "".join(f"{value * 1000:>11,.2f}" for value in values)


def _failed(kind: str, count: int, ink: Ink) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in kind)
    return paint(f"failed: {count} x {shown}"[:WIDTH], Tint.RED, ink)
