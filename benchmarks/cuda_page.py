"""What docs/performance.md says about NVIDIA's devices, from cuda.json and cuda_deep.json.

The table of what has to be shown stands there in any case: a figure that nobody has measured is
OWED, beside the command that measures it. `cuda.py` prints the same table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evidence import source

Figures = dict[str, Any]
Load = Callable[[str], Figures | None]
Told = tuple[str, str]
"""A figure in words, and whether it is enough."""
OWED = "OWED"
YES, NO, OPEN = "yes", "**no**", "not judged"
MEASURE = "python benchmarks/cuda.py"
DEEP = "python benchmarks/cuda_deep.py"
MANY, MEBI = 4096, 1 << 20
SLOWER, ABOVE, SHARES, GAP = 1.1, 1.0, 60.0, 1e-2
PART, LARGE = 0.9, 8 * MEBI
STEP, PAIRS, MOVED, LEAST = 1.05, 5, 0.01, 5.0
WAYS = {
    "host to device": "host pool to slots",
    "staging to slot": "staging to slots, on the device",
    "slot to slot": "slots to slots, on the device",
}
DTYPES, PATHS = ("bfloat16", "float8"), ("boundary", "locked")
JUDGED = "captured"
"""The mode of steps that bars are about."""
DEVICE = {
    "device": "",
    "driver": "driver ",
    "runtime": "CUDA ",
    "torch": "torch ",
    "triton": "Triton ",
}
INTRODUCTION = (
    "One device, one process. Kernels are captured in graphs of many launches and timed by the "
    "device's events, with all that a launch reads in its cache; copies are queued before the "
    "device begins, and stand beside one plain copy of one block of as many bytes; a decode step "
    "is four layers of experts at the dimensions of DeepSeek-V3 (9 slots of one of 32 ranks), "
    "with dense work up to 5 ms, and an epoch of the shipped engine beside it in a group of one. "
    "Contestants take turns; figures are medians of the rounds (least to most)."
)


@dataclass(frozen=True)
class Bar:
    """Something that has to be shown.

    Attributes:
        what: it is.
        asked: of it, in words.
        file: of figures, without its suffix.
        command: that measures it.
        told: the figure and whether it is enough; raises `KeyError` or `ValueError` where it was
            not measured.
    """

    what: str
    asked: str
    file: str
    command: str
    told: Callable[[Figures], Told]

    def cells(self, figures: Figures | None) -> tuple[str, ...]:
        """Of its line in the table."""
        try:
            found = (OWED, OWED) if figures is None else self.told(figures)
        except (KeyError, ValueError):
            found = OWED, OWED
        return (self.what, self.asked, *found, f"`{self.command}`")


def section(load: Load) -> list[str]:
    """All of it, whatever was measured."""
    found = {name: load(name) for name in ("cuda", "cuda_deep")}
    figures = {name: None if file is None else file["figures"] for name, file in found.items()}
    lines = ["## CUDA", "", INTRODUCTION, "", *table(figures)]
    if figures["cuda"] is not None:
        lines += details(figures["cuda"])
    for file in found.values():
        if file is not None:
            lines += [f"On {where(file['figures']['device'])}: {source(file)}", ""]
    return lines


def table(figures: dict[str, Figures | None]) -> list[str]:
    """What has to be shown, line by line; `figures` by file."""
    heads = ("Figure", "Bar", "Measured", "Met", "Command")
    rows = [bar.cells(figures.get(bar.file)) for bar in bars()]
    return [line(heads), f"|{'---|' * len(heads)}", *map(line, rows), ""]


def tried(figures: Figures) -> list[str]:
    """What a trial of the program came to, without a word on what is enough."""
    rows = [bar.cells(figures if bar.file == "cuda" else None)[:3:2] for bar in bars()]
    return [f"trial, {what}: {told}" for what, told in rows if told != OWED]


def line(cells: Sequence[str]) -> str:
    """Of a table."""
    return f"| {' | '.join(cells)} |"


def where(device: Figures) -> str:
    """Device, driver and versions."""
    return ", ".join(f"{words}{device[key]}" for key, words in DEVICE.items())


def spread(found: Figures, form: str = "{:.2f}") -> str:
    """Median, least and most."""
    low, high = form.format(found["lowest"]), form.format(found["highest"])
    return f"{form.format(found['median'])} ({low} to {high})"


def met(held: bool) -> str:
    """In a word."""
    return YES if held else NO


def bars() -> Iterator[Bar]:
    """All that has to be shown."""
    yield from _kernels()
    yield from _copies()
    for dtype in DTYPES:
        for path in PATHS:
            yield from _decode(dtype, path)
    yield Bar("the epoch's part of a step's memory traffic: the most",
              f"at most {MOVED:.0%}", "cuda", MEASURE, _moved)  # fmt: skip
    yield Bar("decode steps: the shortest; pairs of runs",
              f"at least {LEAST:g} ms; {PAIRS}", "cuda", MEASURE, _length)  # fmt: skip
    yield from _deep()
    yield Bar("the baseline beside vLLM's own kernel", "the same slots and counts", "cuda",
              MEASURE, _checked)  # fmt: skip
    yield Bar("device, driver, versions", "told", "cuda", MEASURE,
              lambda f: (where(f["device"]), ""))  # fmt: skip


def _kernels() -> Iterator[Bar]:
    yield Bar("routing and counting over hash and count, 4,096 tokens and more: the slowest",
              f"at most {SLOWER:g}", "cuda", MEASURE, _slowest)  # fmt: skip
    yield Bar("the same below 4,096 tokens, microseconds above it: the most",
              f"at most {ABOVE:g}", "cuda", MEASURE, _above)  # fmt: skip
    yield Bar("exact shares, microseconds a layer (288 slots, 32 ranks)",
              f"at most {SHARES:g}", "cuda", MEASURE, _shares)  # fmt: skip
    yield Bar("their imbalance above the optimum: the worst layer",
              f"at most {GAP:g}", "cuda", MEASURE, _gap)  # fmt: skip


def _slowest(figures: Figures) -> Told:
    rows = [row for row in figures["kernels"]["routing"] if row["tokens"] >= MANY]
    worst = max(rows, key=lambda row: row["ratio"]["median"])
    told = f"{spread(worst['ratio'])}, at {worst['tokens']:,} tokens"
    return told, met(worst["ratio"]["median"] <= SLOWER)


def _above(figures: Figures) -> Told:
    rows = [row for row in figures["kernels"]["routing"] if row["tokens"] < MANY]
    worst = max(rows, key=lambda row: row["above"]["median"])
    told = f"{spread(worst['above'])}, at {worst['tokens']:,} tokens"
    return told, met(worst["above"]["median"] <= ABOVE)


def _shares(figures: Figures) -> Told:
    found = figures["kernels"]["shares"]["microseconds"]
    return spread(found, "{:.1f}"), met(found["median"] <= SHARES)


def _gap(figures: Figures) -> Told:
    found = figures["kernels"]["shares"]["gap"]["highest"]
    return f"{found:.5f}", met(found <= GAP)


def _copies() -> Iterator[Bar]:
    for way, words in WAYS.items():

        def told(figures: Figures, way: str = way) -> Told:
            rows = [
                row
                for row in figures["copies"]["rows"]
                if row["way"] == way and row["asked_bytes"] >= LARGE
            ]
            worst = min(rows, key=lambda row: row["part"]["median"])
            words = f"{spread(worst['part'])}, at {worst['asked_bytes'] / MEBI:g} MiB"
            return words, met(worst["part"]["median"] >= PART)

        yield Bar(f"copies, {words}, over one plain copy, slots of 8 MiB and more: the slowest",
                  f"at least {PART:g}", "cuda", MEASURE, told)  # fmt: skip


def row_of(figures: Figures, dtype: str, path: str) -> Figures:
    """Of decode steps. Raises `KeyError` where it was not measured."""
    for row in figures["decode"]["rows"]:
        if (row["dtype"], row["path"], row["mode"]) == (dtype, path, JUDGED):
            return dict(row)
    raise KeyError(f"{dtype}, {path}")


def _decode(dtype: str, path: str) -> Iterator[Bar]:
    for part, words in (("median", "median"), ("p99", "P99")):

        def told(figures: Figures, part: str = part) -> Told:
            found = row_of(figures, dtype, path)[f"{part}_ratio"]
            return spread(found, "{:.3f}"), met(found["median"] <= STEP)

        yield Bar(f"decode step with an epoch over without, {dtype}, {path}, captured: {words}",
                  f"at most {STEP:g}", "cuda", MEASURE, told)  # fmt: skip


def _moved(figures: Figures) -> Told:
    rows = figures["decode"]["rows"]
    most = max(row["share"] for row in rows)
    while_moving = max(row["peak_share"] for row in rows)
    inside = min(row["inside"] for row in rows)
    told = (
        f"{most:.2%} in all steps, {while_moving:.2%} while layers change; {inside:.0%} of steps "
        "in an epoch"
    )
    return told, met(max(most, while_moving) <= MOVED)


def _length(figures: Figures) -> Told:
    least, pairs = min(row["least_ms"] for row in figures["decode"]["rows"]), figures["decode"]
    return f"{least:.2f} ms; {pairs['pairs']}", met(least >= LEAST and pairs["pairs"] >= PAIRS)


def _checked(figures: Figures) -> Told:
    found = figures["vllm"]
    if found["same"] is None:
        return found["said"], OPEN
    sizes = ", ".join(f"{row['tokens']:,}" for row in found["rows"])
    return f"{found['said']}, {sizes} tokens", met(found["same"])


def _deep() -> Iterator[Bar]:
    yield Bar("conformance: clauses violated", "none", "cuda_deep", f"{DEEP} conformance", _clauses)
    for suite, words in (
        ("faults", "the engine's fault matrix"),
        ("channels", "channel programs between stages"),
    ):

        def told(figures: Figures, suite: str = suite) -> Told:
            found = figures[suite]
            ended = ", ".join(f"{count} {how}" for how, count in found["ended"].items())
            why = "".join(f"; {reason}" for reason in found["reasons"])
            passed = found["ended"].get("passed", 0)
            whole = found["exit_code"] == 0 and set(found["ended"]) <= {"passed", "skipped"}
            verdict = met(whole) if passed or not whole else OPEN
            return f"{ended or 'nothing'}, in {found['seconds']} s{why}", verdict

        yield Bar(f"{words}: tests", "all pass", "cuda_deep", f"{DEEP} {suite}", told)


def _clauses(figures: Figures) -> Told:
    found = figures["conformance"]
    ended = ", ".join(f"{count} {how}" for how, count in found["ended"].items())
    told = f"{ended}, in {found['seconds']:.0f} s"
    return told, met(found["exit_code"] == 0 and not found["ended"].get("violated", 0))


def details(figures: Figures) -> list[str]:
    """The tables behind the bars."""
    return [*_routing(figures["kernels"]), *_sizes(figures["copies"]), *_steps(figures["decode"])]


def _routing(kernels: Figures) -> list[str]:
    names = list(kernels["routing"][-1]["microseconds"])
    lines = [
        "### CUDA: kernels, microseconds a launch",
        "",
        line(["tokens x top-8", *names, "ours over hash and count"]),
        f"|---|{'---|' * (len(names) + 1)}",
    ]
    for row in kernels["routing"]:
        cells = [spread(row["microseconds"][name]) for name in names]
        ratio = spread(row["ratio"]) if "ratio" in row else OWED
        lines.append(line([f"{row['tokens']:,}", *cells, ratio]))
    lines += ["", line(["kernel", "of", "microseconds", "GB per second"]), "|---|---|---|---|"]
    for row in kernels["others"]:
        known = row.get("gigabytes_per_second")
        rate = spread(known, "{:,.0f}") if known else ""
        lines.append(line([f"`{row['what']}`", row["of"], spread(row["microseconds"]), rate]))
    return [*lines, ""]


def _sizes(copies: Figures) -> list[str]:
    lines = [
        f"### CUDA: copies of {copies['batch']} slots a call",
        "",
        line(["copies", "MiB a slot", "GB per second", "one plain copy", "part of it",
              "host, microseconds a call"]),
        f"|{'---|' * 6}",
    ]  # fmt: skip
    for row in copies["rows"]:
        lines.append(line([
            WAYS[row["way"]],
            f"{row['asked_bytes'] / MEBI:g}",
            spread(row["gigabytes_per_second"], "{:,.1f}"),
            spread(row["ceiling"], "{:,.1f}"),
            spread(row["part"]),
            f"{row['host_microseconds']:,.0f}",
        ]))  # fmt: skip
    return [*lines, ""]


def _steps(decode: Figures) -> list[str]:
    lines = [
        "### CUDA: decode steps, milliseconds",
        "",
        line(["experts", "path", "steps", "median without", "with", "ratio", "P99 without",
              "with", "ratio", "moved", "epochs"]),
        f"|{'---|' * 11}",
    ]  # fmt: skip
    for row in decode["rows"]:
        cells = [row["dtype"], row["path"], row["mode"]]
        for part in ("median", "p99"):
            cells += [spread(row[part][key]) for key in ("without", "with")]
            cells.append(spread(row[f"{part}_ratio"], "{:.3f}"))
        lines.append(line([*cells, f"{row['share']:.2%}", str(row["epochs"])]))
    ways = {row["dtype"]: row["experts"] for row in decode["rows"]}
    lines += ["", f"Experts: {'; '.join(f'{dtype}, {way}' for dtype, way in ways.items())}.", ""]
    return [*lines, *(f"Left out: {why}." for why in decode["left_out"]), ""]
