"""What docs/performance.md says about stages that overlap, from a file of figures."""

from collections.abc import Sequence
from typing import Any

from handovers import BLOCKING, COORDINATOR, OURS
from pipeline_emulation import FLOOR, PREPARE, STAGES

Figures = dict[str, Any]
PART, FASTER, LEAST, ABOVE = 0.95, 1.3, 0.97, 1.0
"""The bars, of two stages. Where a transfer takes half of compute or more: part of the
compute-bound rate at least, and over blocking where bytes take most of the transfer. Elsewhere:
over blocking. At every point: over the coordinator's pattern."""
HALF = 0.499
"""Part of compute that counts as half: some are asked for exactly that."""
KINDS = {
    "e2e": "end-to-end latency",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
}
INTRODUCTION = (
    "Stages, one process each, on an emulated device: a stage is a timed wait, so long that a "
    "transfer on the idle link takes the given part of it, but no shorter than "
    f"{FLOOR * 1e3:g} ms; in the first {PREPARE:.0%} of it the host prepares inputs and needs no "
    "activations. Messages and links are real; every message's stamps are looked at. *blocking*: "
    "rendezvous, a message a tensor, shapes known. *coordinator*: pickled metadata that the "
    "receiver's host waits for, then a message a tensor into fresh tensors. *a word*: a yardstick, "
    "8 bytes in place of the activations, receives posted ahead. All take turns in one run, on the "
    "same processes; a figure is the median of the rounds, with least and most. "
    "*Compute-bound* is the rate of a pipeline whose transfers take no time. How it is measured: "
    "[Measuring the pipeline](design/measuring-the-pipeline.md)."
)


def text(figures: Figures) -> list[str]:
    """Everything of pipeline.json."""
    lines = [INTRODUCTION, ""]
    for link in figures["links"]:
        lines += [f"### {link['stages']} stages, {link['name']}", "", link_told(link), ""]
        lines += _points(link)
        for scenario in link["serving"]:
            lines += _scenario(scenario)
    return lines


def link_told(link: Figures) -> str:
    """What the link is, beside what was asked for."""
    measured, asked = link["measured"], link["asked"]
    found = (
        f"The link as measured: {measured['latency'] * 1e3:.3f} ms one way for 8 bytes, "
        f"{measured['rate'] / 1e6:,.0f} MB/s for 16 MiB"
    )
    if asked is None:
        return f"{found}."
    return f"{found}; asked for: {asked['latency'] * 1e3:g} ms, {asked['rate'] / 1e6:,.0f} MB/s."


def _points(link: Figures) -> list[str]:
    """Throughput at every point."""
    if not link["points"]:
        return []
    systems = list(link["points"][0]["systems"])
    beside = [BLOCKING, COORDINATOR] if OURS in systems else [BLOCKING]
    leader = OURS if OURS in systems else COORDINATOR
    judged = OURS in systems and link["stages"] == STAGES
    heads = [
        "hidden x tokens",
        "MB",
        "transfer, ms",
        "transfer / compute (asked)",
        "compute-bound, per second",
        *(f"{system}: per second, part of it" for system in systems),
        *(f"{leader} over {base}" for base in beside),
        *(["met"] if judged else []),
    ]
    lines = [_line(heads), f"|{'---|' * len(heads)}"]
    for point in link["points"]:
        met = [_met(point)] if judged else []
        lines.append(_line([*_cells(point, leader, beside), *met]))
    told = (f"{name} {s['messages']}" for name, s in link["points"][0]["systems"].items())
    lines += ["", f"Messages to the next stage in a step: {', '.join(told)}."]
    return [*lines, "", *(_verdict(link["points"]) if judged else [])]


def _cells(point: Figures, leader: str, beside: Sequence[str]) -> list[str]:
    where = point["point"]
    return [
        f"{where['hidden']} x {where['tokens']}",
        f"{point['bytes'] / 1e6:.2f}",
        f"{point['transfer'] * 1e3:.2f}",
        f"{point['transfer'] / point['compute']:.2f} ({where['ratio']:g})",
        f"{1.0 / point['compute']:.1f}",
        *(
            f"{system['rate']['median']:.1f}, {system['of_bound']['median']:.0%}"
            for system in point["systems"].values()
        ),
        *(_spread(point["over"][leader][base]) for base in beside),
    ]


def missed(point: Figures) -> list[str]:
    """Which bars ours misses at a point; a figure that is no number meets none."""
    mine, over = point["systems"][OURS]["of_bound"], point["over"][OURS]
    asked = FASTER if point["bandwidth_bound"] and _weighty(point) else LEAST
    held = {
        "compute-bound rate": mine["median"] >= PART or not _weighty(point),
        f"over {BLOCKING}": over[BLOCKING]["median"] >= asked,
        f"over {COORDINATOR}": over[COORDINATOR]["median"] > ABOVE,
    }
    return [name for name, met in held.items() if not met]


def _weighty(point: Figures) -> bool:
    """Whether a transfer takes half of compute or more. Where it takes less, overlap gains less:
    blocking alone comes to compute / (compute + transfer) of the compute-bound rate."""
    return bool(point["transfer"] / point["compute"] >= HALF)


def _met(point: Figures) -> str:
    found = missed(point)
    return f"**no**: {', '.join(found)}" if found else "yes"


def _verdict(points: Sequence[Figures]) -> list[str]:
    """In how many points each bar holds."""
    failed = [point for point in points if missed(point)]
    weighty = sum(map(_weighty, points))
    bars = (
        f"Bars. Where a transfer takes half of compute or more, at {weighty} of {len(points)} "
        f"points: {PART:.0%} of the compute-bound rate, and {FASTER} times {BLOCKING} if bytes "
        f"take half of the transfer or more. Elsewhere {LEAST} of {BLOCKING}: there is less to "
        f"gain than that. More than {COORDINATOR} everywhere. "
    )
    if not failed:
        return [f"{bars}Met at all {len(points)} points.", ""]
    return [f"{bars}**Missed at {len(failed)} of {len(points)} points.**", ""]


def _scenario(scenario: Figures) -> list[str]:
    """The table of a scenario: latencies and throughput."""
    columns = list(next(iter(scenario["systems"].values()))["latencies"]["e2e"])
    lines = [
        f"{scenario['name']}; milliseconds:",
        "",
        _line(["", "system", *columns]),
        f"|---|{'---|' * (1 + len(columns))}",
    ]
    for kind, words in KINDS.items():
        for name, system in scenario["systems"].items():
            row = system["latencies"][kind]
            lines.append(_line([words, name, *(f"{row[c] * 1e3:.2f}" for c in columns)]))
    return [*lines, "", *_throughput(scenario), ""]


def _throughput(scenario: Figures) -> list[str]:
    heads = ["system", "duration, s", "requests per second", "tokens per second"]
    lines = [_line(heads), "|---|---|---|---|"]
    for name, system in scenario["systems"].items():
        cells = [
            _spread(system["duration"]),
            _spread(system["requests_per_second"]),
            _spread(system["tokens_per_second"], "{:,.0f}"),
        ]
        lines.append(_line([name, *cells]))
    return lines


def _spread(found: Figures, form: str = "{:.2f}") -> str:
    low, high = form.format(found["lowest"]), form.format(found["highest"])
    return f"{form.format(found['median'])} ({low} to {high})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
