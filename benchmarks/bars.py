"""What the planner has to reach, and whether the figures say that it does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = dict[str, Any]
OWED = "OWED"


def nothing(_: Figures) -> str:
    """No words beside the figure."""
    return ""


@dataclass(frozen=True)
class Bar:
    """A figure that has to be at most so much.

    Attributes:
        what: it is.
        source: file of figures, without its suffix.
        value: the figure; `KeyError` where it was not measured.
        limit: what it may be.
        form: how numbers are written.
        stretch: what would be better still.
        beside: words after the figure.
    """

    what: str
    source: str
    value: Callable[[Figures], float]
    limit: float
    form: str = "{:.4f}"
    stretch: float | None = None
    beside: Callable[[Figures], str] = nothing

    def row(self, figures: Figures | None) -> str:
        """A line of the table."""
        cells = (self.what, self._asked(), *self._told(figures))
        return f"| {' | '.join(cells)} |"

    def _asked(self) -> str:
        asked = f"at most {self.form.format(self.limit)}"
        return asked if self.stretch is None else f"{asked}; {self.form.format(self.stretch)}"

    def _told(self, figures: Figures | None) -> tuple[str, str]:
        if figures is None:
            return OWED, OWED
        try:
            value = self.value(figures)
            return self.form.format(value) + self.beside(figures), self._met(value)
        except KeyError:
            return OWED, OWED

    def _met(self, value: float) -> str:
        if not value <= self.limit:
            return "**no**"
        if self.stretch is None:
            return "yes"
        return "yes, both" if value <= self.stretch else "yes; not the second"


def figure(shape: str, *path: str) -> Callable[[Figures], float]:
    """The figure of a shape that is found along `path`."""

    def found(figures: Figures) -> float:
        at: Any = figures[shape]
        for key in path:
            at = at[key]
        return float(at)

    return found


def _next_over_greedy(figures: Figures) -> float:
    rows = figures["a"]["algorithms"]
    return float(rows["incremental"]["next_stays"] / rows["greedy"]["next_stays"] - 1.0)


def _same_load(figures: Figures) -> float:
    return float(max(found["unchanged"]["moved_held"] for found in figures.values()))


def _plans(figures: Figures) -> str:
    found = [shape["unchanged"] for shape in figures.values()]
    held, plans = (sum(row[key] for row in found) for key in ("held", "plans"))
    most = max(row["moved"] for row in found)
    return f", of {held:,} plans on {len(found)} shapes; of the {plans - held} that miss it {most}"


def _gap(figures: Figures) -> float:
    return float(max(max(found["gaps"].values()) for found in figures.values()))


def _gap_where(figures: Figures) -> str:
    most = max(figures, key=lambda name: max(figures[name]["gaps"].values()))
    gaps, step = figures[most]["gaps"], figures[most]["step"]
    where = f"{figures[most]['shape']['ranks']} ranks, {max(gaps, key=gaps.get)}"
    return f" ({where}; 1/65536 of the hottest expert is {step:.5f} there)"


def _spread(kind: str) -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        row = figures["a"]["times"][kind]
        return f" ({row['lowest']:.2f} to {row['highest']:.2f})"

    return told


def _ratio(*kinds: str) -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        rows = figures["e"]["times"]
        return "; over greedy's: " + ", ".join(f"{k} {rows[k]['ratio']:.1f}" for k in kinds)

    return told


def _slowest(*kinds: str) -> Callable[[Figures], float]:
    return lambda figures: max(figures["e"]["times"][kind]["seconds_highest"] for kind in kinds)


def _greedy(shape: str) -> Callable[[Figures], str]:
    exact = figure(shape, "algorithms", "greedy", "exact")
    return lambda figures: f", greedy's placement {exact(figures):.4f}"


LEVEL_START = "first layout, log-normal 0.02"


def _drop_in(figures: Figures, key: str) -> list[float]:
    return [float(row[key]) for row in figures["starts"][LEVEL_START]["drop-in"]]


def _off_start(figures: Figures) -> float:
    return max(abs(score - 1.14) for score in _drop_in(figures, "before"))


def _beside(policy: str) -> str:
    return f"{policy} {{after:.4f}} with {{moves:,.0f}}"


def _rivals(figures: Figures) -> str:
    rows: Mapping[str, list[Figures]] = figures["starts"][LEVEL_START]
    told = [
        _beside(name).format(
            **{key: max(row[key] for row in rows[name]) for key in ("after", "moves")}
        )
        for name in ("swift-like", "greedy")
    ]
    return "; " + ", ".join(told)


def _a(*path: str) -> Callable[[Figures], float]:
    return figure("a", "algorithms", *path)


PLANNER = (
    Bar("imbalance that `connected` plans", "planner", _a("connected", "plan"), 0.001,
        beside=lambda f: f", worst layer {_a('connected', 'worst')(f):.4f}"),
    Bar("time of `connected` over greedy's", "planner", figure("a", "times", "connected", "ratio"),
        2.0, "{:.2f}", beside=_spread("connected")),
    Bar("time of `incremental` over greedy's, steady", "planner",
        figure("a", "times", "steady", "ratio"), 0.5, "{:.2f}", beside=_spread("steady")),
    Bar("time of `incremental` over greedy's, at a switch", "planner",
        figure("a", "times", "switch", "ratio"), 4.0, "{:.2f}", beside=_spread("switch")),
    Bar("copies that `incremental` moves where the same load is planned on twice and the target "
        "holds, all shapes: the most", "planner", _same_load, 0, "{:.0f}", beside=_plans),
    Bar("imbalance that `incremental` plans, window with the highest", "planner",
        _a("incremental", "plan_highest"), 0.02),
    Bar("slots that `incremental` moves, steady", "planner", _a("incremental", "moved_steady"),
        0.01, "{:.2%}", 0.004),
    Bar("slots that `incremental` moves, at a switch", "planner",
        _a("incremental", "moved_switch"), 0.06, "{:.2%}", 0.04),
    Bar("imbalance of the next window above greedy's, `incremental`", "planner",
        _next_over_greedy, 0.15, "{:.1%}", 0.05),
    Bar("imbalance of a batch with exact shares, `connected`, 32 ranks", "planner",
        _a("connected", "exact"), 0.01, beside=_greedy("a")),
    Bar("the same, 64 ranks, 320 slots", "planner",
        figure("b", "algorithms", "connected", "exact"), 0.02, beside=_greedy("b")),
    Bar("the same, 128 ranks, 61 x 384, 512 slots", "planner",
        figure("d", "algorithms", "connected", "exact"), 0.035, beside=_greedy("d")),
    Bar("seconds for placement and shares, 576 ranks, 1,152 slots: the slowest", "planner",
        _slowest("connected"), 2.0, "{:.2f}", beside=_ratio("connected")),
    Bar("seconds of `incremental` there: the slowest", "planner", _slowest("steady", "switch"),
        0.5, "{:.2f}", beside=_ratio("steady", "switch")),
    Bar("shares above the optimum of the linear program: the worst layer of all shapes",
        "planner", _gap, 0.001, "{:.5f}", beside=_gap_where),
    Bar("vllm-ascend's shape: max/mean of the start layout, off 1.14, seeds 0 to 4", "even_split",
        _off_start, 0.02),
    Bar("max/mean afterwards, even split: the highest", "even_split",
        lambda f: max(_drop_in(f, "after")), 1.02, beside=_rivals),
    Bar("moves for that: the most", "even_split", lambda f: max(_drop_in(f, "moves")), 3700,
        "{:,.0f}"),
)  # fmt: skip
"""58 layers x 256 experts, 288 slots, 32 ranks unless said."""


def table(load: Callable[[str], Figures | None]) -> list[str]:
    """All of them; `load` finds the contents of a file of results, or None."""
    files = {bar.source: load(bar.source) for bar in PLANNER}
    figures = {name: None if found is None else found["figures"] for name, found in files.items()}
    return [
        "| Figure | Bar; stretch | Measured | Met |",
        "|---|---|---|---|",
        *(bar.row(figures[bar.source]) for bar in PLANNER),
        "",
    ]
