"""The HTML report of a run: one file that needs neither network nor folder."""

import json
from collections.abc import Iterator

from equipoise.demo.run_record import Rebalance, RunRecord
from equipoise.report.page import render_page
from equipoise.report.run.plots import pictures
from equipoise.report.run.summary import RunSummary, committed_rebalances, main_variant
from equipoise.report.run.table import COLUMNS, cells, core_sharing, ordered_variants, verdict
from equipoise.report.svg import PlotsMissing
from equipoise.report.text import human_bytes, pluralize

__all__ = ["PlotsMissing", "render_html"]

NONE = "\u2013"


def render_html(record: RunRecord, summary: RunSummary, command: str) -> str:
    """The whole file as text. Raises PlotsMissing without matplotlib."""
    names = [name for name, _ in ordered_variants(summary)]
    rows = [[text.removeprefix("* ").strip() for text in cells(summary, name)] for name in names]
    main = main_variant(record)
    rebalances = () if main is None else committed_rebalances(main)
    figures = json.dumps(summary.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    return render_page(
        "run.html",
        command=command,
        title=f"Balanced serving on {summary.ranks_text}",
        subtitle=_subtitle(summary),
        verdict=verdict(summary),
        verdict_class="bad" if summary.exit_code else "good",
        tiles=list(_tiles(summary)),
        first_step=summary.measured_from_step,
        last_step=summary.steps - 1,
        compared=_compared_with(summary),
        heads=COLUMNS,
        rows=rows,
        bold=names.index(summary.shares) if summary.shares in names else None,
        pictures=pictures(record),
        rebalances=[_rebalance(one, record) for one in rebalances],
        moves=list(_moves(rebalances)),
        samples=list(zip(record.phases, record.prompts, record.continuations, strict=False)),
        engine=[
            (key, human_bytes(int(value)) if key == "staging_bytes" else value)
            for key, value in summary.engine_options.items()
        ],
        machine=list(_machine(summary)),
        figures=figures,
    )


def _subtitle(summary: RunSummary) -> str:
    kinds = " \u2192 ".join(summary.phases)
    return (
        f"{summary.layers} layers of {summary.experts} experts in {summary.slots} slots, "
        f"{summary.sharing_text}. {summary.tokens:,} tokens in {summary.steps} steps: {kinds}."
    )


def _tiles(summary: RunSummary) -> Iterator[tuple[str, str]]:
    noise, untouched = "", ""
    if summary.has_unbalanced:
        noise = f"; noise {_seconds(summary.stall_noise_seconds)}"
        untouched = f"; {_rate(summary.tokens_per_second_unbalanced)} without balancing"
        yield _decimal(summary.imbalance_unbalanced), "imbalance without balancing"
    yield _decimal(summary.imbalance_balanced), f"imbalance, {summary.sharing_text}"
    if summary.has_unbalanced:
        yield _smaller(summary), "times smaller"
    yield _decimal(summary.noise_floor), "noise floor"
    if not summary.serves_placement:
        yield f"{summary.copies:,}", f"copies moved, {human_bytes(summary.bytes_moved)}"
        yield f"{summary.rebalances}", "rebalances committed"
        yield _seconds(summary.stall_seconds), f"stall{noise}"
    yield _rate(summary.tokens_per_second), f"tokens/s{untouched}"


def _compared_with(summary: RunSummary) -> str:
    """What the columns of the table are compared with, in words."""
    turns = core_sharing(summary)
    speed = f". {turns}" if turns else ""
    if summary.has_unbalanced:
        return (
            ", and how many times smaller than without balancing. "
            f"Stall is time above the median step without balancing{speed}"
        )
    return (
        ". The traffic was not served without balancing. "
        f"Stall is time above the variant's own median step{speed}"
    )


def _rebalance(rebalance: Rebalance, record: RunRecord) -> tuple[str, ...]:
    phase = record.phases[sum(rebalance.step >= switch for switch in record.switch_steps)]
    imbalances = rebalance.before, rebalance.predicted, rebalance.actual
    return (
        str(rebalance.number),
        str(rebalance.step),
        phase,
        f"{rebalance.copies:,}",
        *map(_fine, imbalances),
        _seconds(sum(rebalance.seconds.values()) if rebalance.seconds else None),
    )


def _moves(rebalances: tuple[Rebalance, ...]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A name and a row for each layer, of those rebalances whose copies are known."""
    for rebalance in rebalances:
        by_layer: dict[int, list[str]] = {}
        for layer, expert, source, target in rebalance.moves:
            sender = "host" if source is None else source
            by_layer.setdefault(layer, []).append(f"{expert} ({sender}\u2192{target})")
        if by_layer:
            moved = pluralize(len(rebalance.moves), "expert")
            name = f"Rebalance {rebalance.number}, before step {rebalance.step}: {moved}"
            rows = [(str(layer), ", ".join(copies)) for layer, copies in by_layer.items()]
            yield name, rows


def _machine(summary: RunSummary) -> Iterator[tuple[str, str]]:
    yield "backend", f"{summary.backend} over {summary.communicator}"
    yield from summary.machine.items()
    yield "outputs", summary.reference_outputs
    if summary.serves_placement:
        yield "placement", summary.placement


def _smaller(summary: RunSummary) -> str:
    before, after = summary.imbalance_unbalanced, summary.imbalance_balanced
    return f"{before / after:.1f}" if before is not None and after else NONE


def _decimal(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _fine(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} s"


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"
