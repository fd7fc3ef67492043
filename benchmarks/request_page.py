"""Tables of request balance on docs/performance.md, from their figures."""

from typing import Any

Figures = dict[str, Any]
PUBLISHED = {"round_robin": 1.0, "jsq": 0.84, "br0": 0.20, "brh_oracle": 0.0925}
"""Imbalance in terms of round_robin's: BalanceRoute's table, `Proprietary`, 8 workers."""
WITHIN = 0.3
WAIT = 1.6
BELOW = 1.15
DECIDED = {"8": 2.0, "128": 20.0}
STEPPED = 1e5
ADDED = 2.0
"""Milliseconds that the proxy may add, P50."""


def balance(figures: Figures) -> list[str]:
    """Replication, the saturated workloads, and below saturation, each with its bars."""
    lines = [
        f"Simulated (`docs/design/request-balance.md`), {figures['seeds']} seeds, half of a step "
        "fixed; mean and half width of the 95 % confidence interval. *Imbalance*: G times the "
        "largest load less the sum, thousand KV tokens; *idle*: of the load-dependent time; *gap*: "
        "throughput below that of the same steps perfectly balanced. Last two columns: what `fit` "
        "is beside the policy, seed by seed.",
        "",
        *_replication(figures["published"]),
    ]
    for case in figures["cases"]:
        lines += ["", f"**{case['title']}, saturated**", "", *_saturated(case["saturated"])]
    return [*lines, "", *_below(figures["cases"]), ""]


def _replication(rows: Figures) -> list[str]:
    base = rows["round_robin"]["figures"]["imbalance"]["mean"]
    lines = [
        "| prop, 8 workers x 72 slots | imbalance | of round_robin's | published | off by |",
        "|---|---|---|---|---|",
    ]
    worst = 0.0
    for name, wanted in PUBLISHED.items():
        found = rows[name]["figures"]["imbalance"]
        part = found["mean"] / base
        worst = max(worst, abs(part / wanted - 1))
        off = f"{part / wanted - 1:+.0%}"
        lines.append(f"| `{name}` | {_thousand(found)} | {part:.3f} | {wanted:g} | {off} |")
    fit = rows["fit"]["figures"]["imbalance"]
    lines.append(f"| `fit` | {_thousand(fit)} | {fit['mean'] / base:.3f} | | |")
    return [*lines, "", f"Bar: within {WITHIN:.0%}. {_verdict(worst <= WITHIN)}: {worst:.0%}."]


def _saturated(rows: Figures) -> list[str]:
    lines = [
        "| policy | imbalance | idle | tokens/s | gap | TPOT P95, ms | wait P99, s | fairness "
        "| `fit`: imbalance | `fit`: tokens/s |",
        f"|---|{'---|' * 9}",
    ]
    for name, row in rows.items():
        found, beside = row["figures"], row["fit_beside"]
        cells = [
            f"`{name}`",
            _thousand(found["imbalance"]),
            f"{found['idle']['mean']:.1%}",
            f"{found['throughput']['mean']:,.0f} ± {found['throughput']['half']:,.0f}",
            f"{found['gap']['mean']:.1%}",
            f"{1e3 * found['tpot_p95']['mean']:.1f}",
            f"{found['wait_p99']['mean']:.2f}",
            f"{found['fairness']['mean']:.2f}",
            *(["", ""] if name == "fit" else map(_beside, beside.values())),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", _judged(rows)]


def _judged(rows: Figures) -> str:
    """`fit` against every other policy, and its waits against `br0`'s."""
    others = {name: row["fit_beside"] for name, row in rows.items() if name != "fit"}
    wrong = [
        name
        for name, beside in others.items()
        if beside["imbalance"]["mean"] - beside["imbalance"]["half"] > 0
        or beside["throughput"]["mean"] + beside["throughput"]["half"] < 0
    ]
    even = [
        name
        for name, beside in others.items()
        if name not in wrong
        and (
            beside["imbalance"]["mean"] + beside["imbalance"]["half"] > 0
            or beside["throughput"]["mean"] - beside["throughput"]["half"] < 0
        )
    ]
    waits = rows["fit"]["figures"]["wait_p99"]["mean"] / rows["br0"]["figures"]["wait_p99"]["mean"]
    told = f", not against {', '.join(wrong)}" if wrong else ""
    told += f", not to be told from {', '.join(even)} in one of the two" if even else ""
    return (
        "Bars: `fit` at or below every imbalance and at or above every throughput: "
        f"{_verdict(not wrong)}{told}; its wait P99 at most {WAIT:g} times `br0`'s: "
        f"{_verdict(waits <= WAIT)}, {waits:.2f}."
    )


def _below(cases: list[Figures]) -> list[str]:
    lines = [
        "| below saturation, Poisson | load | `jsq` | `jsq_load` | `br0` | `fit` "
        "| `fit` / `jsq_load` |",
        "|---|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for case in cases:
        for load, rows in case["below"].items():
            part = 1 + rows["jsq_load"]["fit_beside"]["imbalance"]["mean"]
            worst = max(worst, part)
            found = [_thousand(row["figures"]["imbalance"]) for row in rows.values()]
            lines.append(
                f"| {case['title']} | {float(load):.0%} | {' | '.join(found)} | {part:.2f} |"
            )
    verdict = f"Bar: at most {BELOW:g}. {_verdict(worst <= BELOW)}: {worst:.2f} at most."
    return [*lines, "", verdict]


def speed(figures: Figures) -> list[str]:
    """What a decision costs, and how fast the simulator steps."""
    workers = list(figures["decisions"])
    lines = [
        "A decision: one request ended and one arrived, 64 slots a worker, 4 waiting requests for "
        "each; the native router called from Python, in microseconds; the P99 in brackets.",
        "",
        f"| policy | {' | '.join(f'{count} workers' for count in workers)} |",
        f"|---|{'---|' * len(workers)}",
    ]
    for name in figures["decisions"][workers[0]]:
        cells = [figures["decisions"][count][name] for count in workers]
        told = [f"{cell['median']:.2f} ({cell['p99']:.2f})" for cell in cells]
        lines.append(f"| `{name}` | {' | '.join(told)} |")
    for count, bar in DECIDED.items():
        fit = figures["decisions"][count]["fit"]["median"]
        lines += [
            "",
            f"Bar for `fit` at {count} workers: {bar:g}. {_verdict(fit <= bar)}: {fit:.2f}.",
        ]
    for name, found in figures["steps"].items():
        lines += [
            "",
            f"Simulated steps a second, `{name}`, 8 workers x 72 slots, one thread: "
            f"{found['median']:,.0f} ({found['lowest']:,.0f} to {found['highest']:,.0f}).",
        ]
    rate = figures["steps"]["br0"]["median"]
    return [*lines, "", f"Bar: {STEPPED:,.0f} with `br0`. {_verdict(rate >= STEPPED)}.", ""]


def proxy(figures: Figures) -> list[str]:
    """What the proxy adds to a request."""
    lines = [
        "One client, one connection, one worker that answers at once, on loopback, each "
        "a process; pairs of a request straight to the worker and one through the proxy. "
        "Milliseconds, median of the rounds (lowest to highest).",
        "",
        "| until | straight, P50 | through the proxy, P50 | added, P50 | added, P99 |",
        "|---|---|---|---|---|",
    ]
    for kind, found in figures.items():
        keys = ("direct_p50_ms", "proxy_p50_ms", "added_p50_ms", "added_p99_ms")
        told = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in
                (found[key] for key in keys)]  # fmt: skip
        lines.append(f"| {kind} | {' | '.join(told)} |")
    worst = max(found["added_p50_ms"][0] for found in figures.values())
    return [*lines, "", f"Bar: P50 under {ADDED:g}. {_verdict(worst < ADDED)}: {worst:.2f}.", ""]


def _thousand(found: Figures) -> str:
    return f"{found['mean'] / 1e3:.1f} ± {found['half'] / 1e3:.1f}"


def _beside(found: Figures) -> str:
    return f"{found['mean']:+.1%} ± {found['half']:.1%}"


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"
