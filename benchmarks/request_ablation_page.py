"""Tables of the ablations of request balance, from their figures."""

from typing import Any

Figures = dict[str, Any]
Rows = list[dict[str, Any]]
TITLES = {
    "scaling": "prop, 32 slots a worker, saturated",
    "loads": "prop, 8 x 32, Poisson, part of the capacity",
    "staleness": "prop, 8 x 32, saturated; seconds by which tokens and ends are told late",
    "front_ends": "prop, 8 x 32, saturated; reports every 0.1 s",
    "step_times": "prop, 8 x 32, saturated; fixed part of a step, sigma of the work's noise",
    "drafting": "prop, 8 x 32, saturated; tokens drafted a step, accepted each",
    "prompts": "prompts computed beside decoding, up to 8,192 tokens a step, saturated; weight: "
    "KV tokens that are read in the time that a prompt token takes",
    "prefixes": "Mooncake in its order, 8 x 16, parts of the capacity of decoding; prompts "
    "computed beside decoding (weight 200), 4,000 blocks cached a worker",
}
PROMPTS = ("prompts", "prefixes")
"""Where the time to the first token is more than a wait."""


def text(figures: Figures) -> list[str]:
    """All of them."""
    lines = [
        f"{figures['seeds']} seeds; imbalance in thousand KV tokens, tokens a second, and P99 of "
        "the wait in seconds, each with the half width of its 95 % confidence interval.",
    ]
    for name, title in TITLES.items():
        if figures[name]:
            lines += ["", f"**{title}**", "", *_table(figures[name], name in PROMPTS)]
    return [*lines, "", *_knobs(figures["knobs"]), ""]


def _table(rows: Rows, first_tokens: bool) -> list[str]:
    keys = [key for key in rows[0] if key not in ("policy", "figures")]
    heads = [*keys, "policy", "imbalance", "tokens/s", "wait P99"]
    heads += ["TTFT mean, s", "TPOT mean, ms"] if first_tokens else []
    lines = [_line(heads), f"|{'---|' * len(heads)}"]
    for row in rows:
        found = row["figures"]
        told = (row[key] if isinstance(row[key], str) else f"{row[key]:g}" for key in keys)
        cells = [*told, f"`{row['policy']}`", *_cells(found)]
        cells += _delays(found) if first_tokens else []
        lines.append(_line(cells))
    return lines


def _knobs(rows: Rows) -> list[str]:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        "**Settings of `fit`, one at a time (window 32, ageing 16, slack 0.07 otherwise); "
        "imbalance, tokens/s, wait P99**",
        "",
        _line(["setting", *cases]),
        f"|{'---|' * (1 + len(cases))}",
    ]
    for label in dict.fromkeys(row["policy"] for row in rows):
        found = [row["figures"] for row in rows if row["policy"] == label]
        lines.append(_line([label, *(", ".join(_cells(figures)) for figures in found)]))
    return lines


def _cells(found: Figures) -> list[str]:
    imbalance, speed, wait = found["imbalance"], found["throughput"], found["wait_p99"]
    return [
        f"{imbalance['mean'] / 1e3:.1f} ± {imbalance['half'] / 1e3:.1f}",
        f"{speed['mean']:,.0f} ± {speed['half']:,.0f}",
        f"{wait['mean']:.2f} ± {wait['half']:.2f}",
    ]


def _delays(found: Figures) -> list[str]:
    return [f"{found['ttft_mean']['mean']:.2f}", f"{1e3 * found['tpot_mean']['mean']:.1f}"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
