"""Kernels, copies and a decode step on one NVIDIA device.

    python benchmarks/gpu_speed.py                 some minutes on one device
    python benchmarks/gpu_speed.py --only copies   these parts; others of this commit stay
    python benchmarks/gpu_speed.py --backend cpu   a trial of the program in small; nothing is kept

- kernels: `route_and_count` beside our re-write of another engine's hash-and-count kernel and
  beside plain torch code, 1 to 16,384 tokens x top-8, 256 experts, 288 slots, 32 ranks; the other
  kernels; exact shares, with their gap to the optimum.
- vllm: that re-write beside the kernel itself, where vLLM is installed.
- copies: slots from the host pool, from staging and from slots, 1 to 64 MiB each, beside one plain
  copy of as many bytes.
- decode: a step with and without a rebalance of the shipped engine at the same time, bfloat16 and
  float8, on the staged path and on the in-place path, captured in graphs and not.

Prints what has to be shown, and writes benchmarks/results/gpu_speed.json; `python
benchmarks/report.py` shows it. Ends with 2 where there is no device, and with 1 where a part
failed; the others are measured all the same.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from gpu import copies, decode, kernels
from gpu.stopwatch import Place, facts, open_device, why_unavailable
from lib.results import Row, commit, load, save
from report import show

BACKEND = "cuda"
NO_DEVICE = 2
MANY, MEBI, LARGE = 4096, 1 << 20, 8 << 20
"""Tokens, and bytes of a slot, from which on other bars hold."""
Figures = dict[str, Any]
PARTS: dict[str, Callable[[Place, bool], Figures]] = {
    "kernels": lambda place, trial: kernels.measure(place, _sizes(kernels, trial)),
    "vllm": lambda place, trial: kernels.check_against_vllm(place, _sizes(kernels, trial)),
    "copies": lambda place, trial: copies.measure(place, _sizes(copies, trial)),
    "decode": lambda place, trial: decode.measure(place, _sizes(decode, trial)),
}
"""In this order: in full, or as a trial."""


def _sizes(part: Any, trial: bool) -> Any:
    return part.TRIAL if trial else part.FULL


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; 2 where there is no device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backend", default=BACKEND, help="any but cuda is tried in small, and nothing is kept"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    options = parser.parse_args(arguments)
    if why := why_unavailable(options.backend):
        sys.stderr.write(f"gpu_speed.py cannot run here: {why}\n")
        return NO_DEVICE
    trial, began, failed = options.backend != BACKEND, time.monotonic(), False
    with open_device(options.backend) as place:
        measurements: Figures = {"device": facts(place)}
        for name, part in PARTS.items():
            if name in options.only:
                sys.stderr.write(f"{name}, {time.monotonic() - began:.0f} s\n")
                try:
                    measurements[name] = part(place, trial)
                except Exception:  # a device's hour is short: the others are worth having
                    traceback.print_exc()
                    failed = True
    figures, tables = figures_of(measurements), tables_of(measurements)
    if trial:
        print(f"A trial of the program on {options.backend}, in small; nothing is kept.")
        for name, value in figures.items():
            print(f"trial, {name}: {value}")
        return int(failed)
    figures, tables = merge_earlier(load("gpu_speed"), figures, tables)
    show("gpu_speed", figures, tables)
    names = [] if options.only == list(PARTS) else ["--only", *options.only]
    save("gpu_speed", ["python", "benchmarks/gpu_speed.py", *names], figures, tables)
    return int(failed)


def merge_earlier(
    earlier: Figures | None, figures: Row, tables: dict[str, list[Row]]
) -> tuple[Row, dict[str, list[Row]]]:
    """Adds the parts that were not measured now, as the same device showed them at this commit:
    results name one commit and one device for all of their figures."""
    if earlier is None or earlier["commit"] != commit():
        return figures, tables
    if earlier["figures"].get("device") != figures["device"]:
        return figures, tables
    return {**earlier["figures"], **figures}, {**earlier["tables"], **tables}


def figures_of(measurements: Figures) -> Row:
    """What bars are about, as far as it was measured."""
    device = measurements["device"]
    words = f"{device['device']}, driver {device['driver']}, CUDA {device['runtime']}, "
    figures: Row = {"device": f"{words}torch {device['torch']}, Triton {device['triton']}"}
    if "kernels" in measurements:
        figures |= _of_kernels(measurements["kernels"])
    if "vllm" in measurements:
        comparison = measurements["vllm"]
        figures["vllm"] = {"value": comparison["said"], "met": comparison["same"]}
    if "copies" in measurements:
        figures |= _of_copies(measurements["copies"])
    if "decode" in measurements:
        figures |= _of_decode(measurements["decode"])
    return figures


def _of_kernels(measurements: Figures) -> Row:
    figures: Row = {
        "shares_microseconds": measurements["shares"]["microseconds"],
        "shares_gap": measurements["shares"]["gap"][2],
    }
    # The kernel that ours is compared with runs on a device only.
    rows = [row for row in measurements["routing"] if "ratio" in row]
    for name, key, many in (("routing_ratio", "ratio", True), ("routing_above", "above", False)):
        of_size = [row for row in rows if (row["tokens"] >= MANY) is many]
        if of_size:
            worst = max(of_size, key=lambda row: row[key][0])
            figures[name] = {"value": worst[key], "note": f"at {worst['tokens']:,} tokens"}
    return figures


def _of_copies(measurements: Figures) -> Row:
    figures: Row = {}
    for way in dict.fromkeys(row["way"] for row in measurements["rows"]):
        of_way = [row for row in measurements["rows"] if row["way"] == way]
        large = [row for row in of_way if row["asked_bytes"] >= LARGE]
        worst = min(large or of_way, key=lambda row: row["part"][0])
        note = f"at {worst['asked_bytes'] / MEBI:g} MiB"
        figures[f"copies, {way}"] = {"value": worst["part"], "note": note}
    return figures


def _of_decode(measurements: Figures) -> Row:
    rows = measurements["rows"]
    figures: Row = {
        f"decode, {row['dtype']}, {row['path']}, {part}": row[f"{part}_ratio"]
        for row in rows
        if row["mode"] == decode.CAPTURED.name
        for part in ("median", "p99")
    }
    most, peak = (max(row[key] for row in rows) for key in ("share", "peak_share"))
    inside = min(row["inside"] for row in rows)
    note = f"the most of {most:.2%} in all steps and {peak:.2%} while layers change"
    figures["traffic"] = {
        "value": max(most, peak),
        "note": f"{note}; {inside:.0%} of steps in a rebalance",
    }
    figures["shortest_step"] = min(row["least_ms"] for row in rows)
    left_out = "; ".join(measurements["left_out"])
    figures["pairs"] = {
        "value": measurements["pairs"],
        "note": left_out and f"left out: {left_out}",
    }
    return figures


def tables_of(measurements: Figures) -> dict[str, list[Row]]:
    """The rows behind the bars."""
    tables: dict[str, list[Row]] = {}
    if "kernels" in measurements:
        tables["routing"] = [
            {
                "tokens": row["tokens"],
                "ours": row["microseconds"][kernels.OURS],
                "theirs": row["microseconds"].get(kernels.THEIRS),
                "torch": row["microseconds"].get(kernels.PLAIN),
                "ratio": row.get("ratio"),
            }
            for row in measurements["kernels"]["routing"]
        ]
        tables["kernels"] = [
            {**row, "rate": row.get("gigabytes_per_second")}
            for row in measurements["kernels"]["others"]
        ]
    if "copies" in measurements:
        tables["copies"] = [
            {
                "way": row["way"],
                "mebibytes": row["asked_bytes"] / MEBI,
                "rate": row["gigabytes_per_second"],
                "ceiling": row["ceiling"],
                "part": row["part"],
                "host": row["host_microseconds"],
            }
            for row in measurements["copies"]["rows"]
        ]
    if "decode" in measurements:
        tables["decode"] = [
            {
                **{key: value for key, value in row.items() if key not in ("median", "p99")},
                **{
                    f"{part}_{side}": row[part][side]
                    for part in ("median", "p99")
                    for side in ("without", "with")
                },
            }
            for row in measurements["decode"]["rows"]
        ]
    return tables


if __name__ == "__main__":
    sys.exit(main())
