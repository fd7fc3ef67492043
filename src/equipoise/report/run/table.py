"""The table that a run ends with, 80 columns wide."""

from collections.abc import Sequence
from textwrap import fill

from equipoise.demo.engine_options import EngineOptions, uses_shares
from equipoise.demo.settings import VariantName
from equipoise.report.run.summary import RunSummary, VariantSummary
from equipoise.report.terminal import ColourMode, TextStyle, styled
from equipoise.report.text import human_bytes, printable

ORDER = tuple(VariantName)
WIDTH = 80
COLUMNS = ("variant", "imbalance", "x noise", "x smaller", "tokens/s", "stall s", "outputs")


def render(summary: RunSummary, colours: ColourMode) -> str:
    """The whole table; its last line is `verdict(summary)`. No line is wider than `WIDTH`, save
    where a phase's name is longer than a line."""
    lines = [
        styled(_title(summary), TextStyle.BOLD, colours),
        styled(_traffic(summary), TextStyle.DIM, colours),
        "",
        *_rows(summary, colours),
        styled("-" * WIDTH, TextStyle.DIM, colours),
        *_moves(summary),
        *_notes(summary),
        "",
        styled(verdict(summary), TextStyle.RED if summary.exit_code else TextStyle.GREEN, colours),
    ]
    return "\n".join(lines)


def verdict(summary: RunSummary) -> str:
    """`outputs identical: yes` or `no`, followed by why nothing was exercised, if so."""
    line = f"outputs identical: {'yes' if summary.outputs_identical else 'no'}"
    if summary.not_exercised is None:
        return line
    return f"{line}; not exercised: {printable(summary.not_exercised)}; try more --steps"


def ordered_variants(summary: RunSummary) -> tuple[tuple[str, VariantSummary], ...]:
    """The variants that were run, from no balancing to the most."""
    rank = {str(name): place for place, name in enumerate(ORDER)}
    return tuple(sorted(summary.variants.items(), key=lambda v: rank.get(v[0], len(ORDER))))


def cells(summary: RunSummary, name: str) -> tuple[str, ...]:
    """The row of one variant, as text under `COLUMNS`."""
    variant = summary.variants[name]
    same = variant.outputs == summary.reference_outputs
    return (
        f"* {name}" if name == summary.shares else f"  {name}",
        _number(variant.imbalance, "{:.4f}"),
        _number(_ratio(variant.imbalance, summary.noise_floor), "{:.2f}"),
        _number(_ratio(summary.imbalance_unbalanced, variant.imbalance), "{:.2f}"),
        _number(variant.tokens_per_second, "{:,.0f}"),
        f"{variant.stall_seconds:.2f}",
        "identical" if same else "DIFFERENT",
    )


def _title(summary: RunSummary) -> str:
    return (
        f"equipoise {summary.version}: {summary.ranks_text} on {summary.backend} over "
        f"{summary.communicator}, {summary.layers} layers, "
        f"{summary.experts} experts in {summary.slots} slots"
    )


def _traffic(summary: RunSummary) -> str:
    kinds = " > ".join(printable(phase) for phase in summary.phases)
    switches = ", ".join(str(step) for step in summary.switch_steps)
    tail = f" (switch at {switches})" if switches else ""
    return f"{summary.tokens:,} tokens in {summary.steps} steps: {kinds}{tail}"


def _rows(summary: RunSummary, colours: ColourMode) -> list[str]:
    lines = [styled(_aligned(COLUMNS), TextStyle.DIM, colours)]
    for name, _ in ordered_variants(summary):
        line = _aligned(cells(summary, name))
        lines.append(styled(line, TextStyle.BOLD, colours) if name == summary.shares else line)
    return lines


def _aligned(texts: Sequence[str]) -> str:
    widths = (14, 11, 9, 11, 11, 10, 14)
    first = f"{texts[0]:<{widths[0]}}"
    return first + "".join(f" {t:>{w - 1}}" for t, w in zip(texts[1:], widths[1:], strict=True))


def _moves(summary: RunSummary) -> list[str]:
    if summary.main is None:
        return ["balancing was off: nothing moved"]
    if summary.serves_placement:
        placement_line = f"placement  {summary.placement} served unchanged: nothing moved"
        return [placement_line, *_engine(summary.engine_options)]
    if summary.ranks == 1:
        return ["one rank has every expert: nothing to balance", *_engine(summary.engine_options)]
    per_rebalance = summary.copies / summary.rebalances if summary.rebalances else 0.0
    share = per_rebalance / summary.slots_total
    by_phase = ", ".join(
        f"{printable(phase)} {n}"
        for phase, n in zip(summary.phases, summary.rebalances_per_phase, strict=True)
    )
    unchanged = (
        f", {summary.rebalances_unchanged} unchanged" if summary.rebalances_unchanged else ""
    )
    lines = [
        f"rebalances {summary.rebalances} committed ({by_phase}){unchanged}",
        f"copies     {summary.copies:,} moved, {per_rebalance:.1f} per rebalance "
        f"= {share:.1%} of {summary.slots_total:,} slots; {human_bytes(summary.bytes_moved)}",
        *_engine(summary.engine_options),
    ]
    if summary.rebalances_aborted:
        reasons = ", ".join(f"{why} {n}" for why, n in sorted(summary.rebalances_aborted.items()))
        lines.append(f"aborted    {reasons}")
    return lines


def _engine(options: EngineOptions) -> list[str]:
    """How weights moved, as asked for; and the routing rule, where shares did not pick replicas."""
    lines = []
    match options:
        case {"commit": "staged", "staging_bytes": room, "slots_per_message": slots}:
            lines.append(
                f"path       staged: {human_bytes(int(room))} of staging per rank, "
                f"messages of {slots} slots"
            )
        case {"commit": "in_place", "layer_updates_per_iter": layers}:
            lines.append(f"path       in place: {layers} layer(s) per step")
    if not uses_shares(options):
        lines.append(f"rule       {options['routing_rule']}: even parts, no shares")
    return lines


def _notes(summary: RunSummary) -> list[str]:
    floor = _number(summary.noise_floor, "{:.4f}")
    if not summary.has_unbalanced:
        stall = "stall      above the variant's own median step: unbalanced was not served"
    else:
        noise = _number(summary.stall_noise_seconds, "{:.2f}")
        stall = (
            f"stall      above the unbalanced median step; {noise} s is this machine's own noise"
        )
    turns = core_sharing(summary)
    return [
        f"imbalance  max/mean - 1 over ranks, steps {summary.measured_from_step} to "
        f"{summary.steps - 1}; noise floor {floor}",
        stall,
        *([fill(f"cores      {turns}", WIDTH, subsequent_indent=" " * 11)] if turns else []),
    ]


def core_sharing(summary: RunSummary) -> str:
    """Why times show no effect of balance where ranks share cores; empty where they do not."""
    cores = int(summary.machine.get("cores", 0))
    ranks = summary.ranks * summary.stages
    if summary.backend != "cpu" or not 0 < cores < ranks:
        return ""
    return (
        f"{ranks} ranks take turns on {cores} core(s): tokens/s cannot show what balance gains, "
        "nor stalls what it costs"
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _number(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)
