"""The table of a request log, 100 columns wide where names of workers are short."""

from collections.abc import Iterator
from math import isnan

from equipoise.report.proxy_log.active_time import date_time_text, duration_text
from equipoise.report.proxy_log.figures import MeanAndP99, ProxyLogFigures, RequestFigures
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import pluralize, printable

HEADS = (
    "requests", "prompt", "output", "load", "wait", "P99", "TTFT", "P99", "TPOT", "P99",
)  # fmt: skip
UNITS = "", "tokens", "tokens", "tokens", "s", "s", "s", "s", "ms", "ms"
ALL = "all"
NONE = "\u2013"


def render(figures: ProxyLogFigures, log: str, colours: ColourMode) -> str:
    """The whole table."""
    rows = [("", *HEADS), ("", *UNITS), *table_rows(figures)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [_aligned(row, widths) for row in rows]
    lines[:2] = [styled(line, TextStyle.DIM, colours) for line in lines[:2]]
    lines[-1] = styled(lines[-1], TextStyle.BOLD, colours)
    head = styled(f"{printable(log)}: {title(figures)}", TextStyle.BOLD, colours)
    return "\n".join([head, *period(figures), *outcomes(figures), "", *lines, "", *notes(figures)])


def title(figures: ProxyLogFigures) -> str:
    """How many requests, workers, seconds."""
    requests, workers = figures.total.requests, len(figures.workers)
    return (
        f"{pluralize(requests, 'request')} in {figures.seconds:,.1f} s on "
        f"{pluralize(workers, 'worker')}"
    )


def period(figures: ProxyLogFigures) -> Iterator[str]:
    """From when to when, and what was left out."""
    begin, end = date_time_text(figures.begin), date_time_text(figures.begin + figures.seconds)
    text = f"{begin} to {end.removeprefix(begin[:11])} UTC"
    if figures.pauses:
        left_out = duration_text(figures.seconds - figures.active_seconds)
        text += f"; {pluralize(figures.pauses, 'pause')} without requests left out, {left_out}"
    yield text


def outcomes(figures: ProxyLogFigures) -> Iterator[str]:
    """How they ended, in a line."""
    yield ", ".join(f"{count:,} {name}" for name, count in figures.outcomes.items())


def table_rows(figures: ProxyLogFigures) -> list[tuple[str, ...]]:
    """A row for each worker, then one for all; as many cells as `HEADS`, after the name."""
    rows = [(printable(name), *_cells(share)) for name, share in figures.workers.items()]
    return [*rows, (ALL, *_cells(figures.total))]


def notes(figures: ProxyLogFigures) -> Iterator[str]:
    """Below the table."""
    if not isnan(figures.imbalance):
        yield (
            f"imbalance {figures.imbalance:,.0f} tokens; idle {figures.idle:.1%}, if each step "
            "waits for the fullest worker; means while requests were bound"
        )
    if figures.total.retried:
        p99 = format_value(figures.total.retry_delay.p99, 1.0, 3)
        yield (
            f"{pluralize(figures.total.retried, 'request')} sent more than once: the last worker "
            f"counts, and the time until then, P99 {p99} s, is in no wait"
        )
    if figures.cut_lines:
        lines = pluralize(figures.cut_lines, "line")
        yield f"{lines} of the log cut off and left out: a proxy was killed, or a disk was full"
    yield "requests that were under way when the proxy was killed are in no log"


def _cells(share: RequestFigures) -> Iterator[str]:
    yield f"{share.requests:,}"
    yield f"{share.prompt:,}"
    yield f"{share.output:,}"
    yield format_value(share.load, 1.0, 0)
    yield from _two(share.wait, 1.0, 3)
    yield from _two(share.ttft, 1.0, 3)
    yield from _two(share.tpot, 1e3, 2)


def _two(spread: MeanAndP99, scale: float, decimals: int) -> Iterator[str]:
    yield format_value(spread.mean, scale, decimals)
    yield format_value(spread.p99, scale, decimals)


def format_value(value: float, scale: float, decimals: int) -> str:
    """A dash for what is not known."""
    return NONE if isnan(value) else f"{value * scale:,.{decimals}f}"


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    cells = (f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True))
    return "  ".join([f"{row[0]:<{widths[0]}}", *cells]).rstrip()
