"""The table of `equipoise replay`: the decision, a row per candidate, what it rests on."""

from collections.abc import Iterator, Sequence
from textwrap import fill

from equipoise.report.replay.decision import Decision, decide, steps_to_first_plan, unpriced_cost
from equipoise.report.replay.inputs import ReplayInputs
from equipoise.report.replay.replay import Outcome, Replay
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import format_size, pluralize

WIDTH = 100
MISSING = "-"
HEADS = "", "slots", "imbalance", "p95", "step", "plans", "moved", "paused", "KV", "gain"
WIDTHS = 30, 7, 10, 8, 9, 6, 10, 8, 9, 8
"""Of the columns; one that has longer cells is wider."""


def render(replay: Replay, colours: ColourMode) -> str:
    """All of it, at most 100 columns wide."""
    decision = decide(replay)
    heading = styled(title(replay), TextStyle.BOLD, colours)
    parts = [
        f"{heading}\n{styled('a model, not a measurement', TextStyle.DIM, colours)}",
        styled(fill(headline(replay, decision), WIDTH), TextStyle.BOLD, colours),
        "\n".join(_rows(replay, decision, colours)),
        *(["\n".join(_refusals(replay))] if replay.refusals else []),
        "\n".join(_engines(replay, decision)),
        "\n".join(["It rests on", *(_line(name, text) for name, text in basis(replay))]),
    ]
    return "\n\n".join(parts)


def headline(replay: Replay, decision: Decision) -> str:
    """The decision in a sentence."""
    if decision.reason is None:
        return (
            f"Undecided: the trace is too short: it has {pluralize(replay.steps, 'step')}, and the "
            f"first plans of all engines serve after {steps_to_first_plan(replay):,}. "
            "Give a longer trace, or smaller --window-size and --step-interval."
        )
    late = [name for name in decision.by_engine if not _planned(replay, name)]
    rest = ""
    if late:
        rest = (
            f" The trace ends before a first plan of {', '.join(late)}: "
            "give a longer one, or smaller --window-size and --step-interval."
        )
    if decision.best is None:
        return f"Leave it off: {decision.reason}.{rest}"
    gain, best = replay.gain(decision.best), decision.best
    what = gained(replay, best)
    return f"{best.name} in {best.slots:,} slots: {gain:+.1%} {what}; {decision.reason}.{rest}"


def gained(replay: Replay, outcome: Outcome) -> str:
    """What the gain is of."""
    what = "throughput"
    if replay.times_in_seconds and not replay.steps_in_seconds:
        what = "throughput of the expert layers alone"
    if not replay.steps_in_seconds and outcome.copies:
        what += ", moves not counted"
    return what


def title(replay: Replay) -> str:
    """What was replayed."""
    source, ranks = replay.inputs.source, replay.inputs.ranks
    layers = pluralize(len(source.layers), "layer")
    return (
        f"{layers} of {pluralize(source.experts, 'expert')} on {pluralize(ranks, 'rank')}, "
        f"{pluralize(replay.steps, 'step')} of {replay.rows:,.0f} rows"
    )


def _rows(replay: Replay, decision: Decision, colours: ColourMode) -> Iterator[str]:
    table = [cells(replay, one) for one in replay.outcomes]
    widths = [
        max(least, *(len(row[column]) + 1 for row in table)) for column, least in enumerate(WIDTHS)
    ]
    yield styled(_aligned(HEADS, widths), TextStyle.DIM, colours)
    for one, row in zip(replay.outcomes, table, strict=True):
        line = _aligned(row, widths)
        yield styled(line, TextStyle.BOLD, colours) if one is decision.best else line


def cells(replay: Replay, one: Outcome) -> tuple[str, ...]:
    """A row of the table, in the order of `HEADS`."""
    return (
        one.name,
        f"{one.slots:,}",
        f"{one.mean_imbalance:.4f}",
        f"{one.high_imbalance:.4f}",
        _step(replay, one),
        f"{len(one.rebalances):,}" if one.cadence else MISSING,
        _moved(replay.inputs, one),
        _paused(replay, one),
        MISSING if one.kv_tokens is None else f"{one.kv_tokens:,}",
        MISSING if one is replay.now else f"{replay.gain(one):+.1%}",
    )


def _step(replay: Replay, one: Outcome) -> str:
    if replay.times_in_seconds:
        return f"{one.mean_seconds * 1e3:.2f} ms"
    return f"{one.mean_seconds / replay.now.mean_seconds:.3f}"


def _moved(inputs: ReplayInputs, one: Outcome) -> str:
    if not one.cadence:
        return MISSING
    if inputs.expert is None:
        return f"{one.copies:,}"
    return format_size(one.copies * inputs.expert.size)


def _paused(replay: Replay, one: Outcome) -> str:
    if not one.cadence or replay.inputs.transfers is None:
        return MISSING
    return f"{one.pauses:.2f} s"


def _aligned(cells: tuple[str, ...], widths: Sequence[int]) -> str:
    rest = "".join(f"{c:>{width}}" for c, width in zip(cells[1:], widths[1:], strict=True))
    return f"{cells[0]:<{widths[0]}}{rest}".rstrip()


def _refusals(replay: Replay) -> Iterator[str]:
    yield "Not replayed"
    for one in replay.refusals:
        yield fill(
            f"{one.name} in {one.slots:,} slots: {one.reason}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
        )


def _engines(replay: Replay, decision: Decision) -> Iterator[str]:
    yield "By engine"
    for engine, advice in engine_advice(replay, decision):
        yield f"  {engine:<14}{advice}"


def engine_advice(replay: Replay, decision: Decision) -> Iterator[tuple[str, str]]:
    """Each engine, and what to do with its balancer."""
    for engine, best in decision.by_engine.items():
        if best is None and (first := steps_to_first_plan(replay, engine)) is not None:
            yield engine, f"undecided: its first plan serves after {first:,} steps"
        elif best is None:
            yield engine, "leave it off"
        else:
            yield engine, f"{best.name} in {best.slots:,} slots, {replay.gain(best):+.1%}"


def _planned(replay: Replay, engine: str) -> bool:
    return any(one.rebalances for one in replay.outcomes if one.engine == engine)


def basis(replay: Replay) -> Iterator[tuple[str, str]]:
    """What the figures rest on: names and texts."""
    inputs = replay.inputs
    yield "trace", inputs.source.description
    yield "step", _step_basis(replay)
    yield "plans", _cadences(replay)
    error = max(one.standard_error for one in replay.outcomes)
    if error:
        evaluated = f"of {len(replay.now.steps):,} steps, evenly spaced"
        yield "imbalance", f"{evaluated}; twice the standard error is {2 * error:.4f}"
    yield "moves", _move_basis(replay)
    yield "KV cache", _cache(inputs)


def _step_basis(replay: Replay) -> str:
    if replay.inputs.step_seconds is not None:
        return f"{replay.inputs.step_seconds * 1e3:g} ms without a balancer; {replay.price}"
    unit = "experts alone" if replay.times_in_seconds else "1 is a step without a balancer"
    return f"{replay.price}; {unit}"


def _move_basis(replay: Replay) -> str:
    inputs = replay.inputs
    if inputs.transfers is None:
        text = "--hardware and --expert-bytes say how long they take"
    else:
        size = format_size(inputs.transfers.expert_bytes)
        text = f"{size} an expert over the {inputs.link} link; "
        if inputs.step_seconds is None:
            text += "pauses count towards the gain where --itl is known"
        else:
            text += "a pause is the transfer alone, without planning"
    costs = [
        f"{one.name} in {one.slots:,} slots: {cost}"
        for one in replay.outcomes
        if not one.collective and (cost := unpriced_cost(replay, one)) is not None
    ]
    return "; not priced: ".join([text, "; ".join(costs)] if costs else [text])


def _cadences(replay: Replay) -> str:
    texts: dict[str, str] = {}
    for one in replay.outcomes:
        if one.cadence is None:
            continue
        how = "pausing" if one.cadence.blocking else "overlapped with the forward pass"
        steps = f"every {one.cadence.interval:,} steps by the last {one.cadence.window:,}"
        if one.cadence.first != one.cadence.interval:
            steps += f", first after {one.cadence.first:,}"
        texts.setdefault(one.engine, f"{one.engine} {steps}, {how}")
    return "; ".join(texts.values())


def _cache(inputs: ReplayInputs) -> str:
    if inputs.kv_cache is None:
        return "unknown; --kv-bytes-per-token and --memory say it"
    memory = f"tokens of a rank, of {format_size(inputs.kv_cache.memory_bytes)} beside its experts"
    if inputs.kv_usage < 1:
        return f"{memory}; {inputs.kv_usage:.0%} of it was in use with the fewest slots"
    return f"{memory}; requests wait for it, so the batch shrinks with it"


def _line(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"  {name:<11}", subsequent_indent=" " * 13)
