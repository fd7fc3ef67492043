"""`equipoise plan`: what it writes, what it says, and what it refuses."""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.balancer import formats
from equipoise.balancer.experts import Plan, plan
from equipoise.balancer.experts.config import Objective, PlanningPolicy, Split
from equipoise.balancer.experts.planning import planner
from equipoise.balancer.formats import format_names
from equipoise.cli import plan as plan_command
from equipoise.cli.plan import PlanRequest

LAYERS, EXPERTS = 3, 8
SHAPE = ("--ranks", "4", "--slots", "12")
OUT = ("-o", "new.json")


@pytest.fixture(autouse=True)
def statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    counts = np.arange(2 * LAYERS * EXPERTS, dtype=np.int64).reshape(2, LAYERS, EXPERTS) ** 2
    monkeypatch.chdir(tmp_path)
    np.save("counts.npy", counts)
    np.save("zero.npy", np.zeros((LAYERS, EXPERTS), dtype=np.int64))
    np.save("negative.npy", -counts)
    np.save("few.npy", counts[..., :4])
    np.save("one.npy", counts[:, :1])
    np.save("sum.npy", counts.sum(axis=0))
    Path("cut.npy").write_bytes(Path("counts.npy").read_bytes()[:200])
    Path("text.csv").write_text("layer,expert,count\n0,0,many\n")
    Path("words.json").write_text("{}")
    Path("bad.yaml").write_text("ranks: four\n")
    Path("unknown.yaml").write_text("rank: 4\n")
    placement_plan = plan(counts, slots=12, ranks=4)
    layout = formats.ExpertPlacement(placement_plan.placement, placement_plan.shares, 4)
    formats.write_placement("installed.json", layout)
    formats.write_placement("installed.yaml", layout)
    return counts


BAD = {
    "no statistics": ((), "STATS is missing: see equipoise"),
    "a missing file": (("none.npy", *SHAPE, *OUT), "none.npy: cannot be read"),
    "a truncated file": (("cut.npy", *SHAPE, *OUT), "cut.npy: "),
    "negative counts": (
        ("negative.npy", *SHAPE, *OUT),
        "negative.npy: window 0, layer 0, expert 1: co",
    ),
    "counts that are words": (("text.csv", *SHAPE, *OUT), "line 2: count is 'many'"),
    "nothing counted": (("zero.npy", *SHAPE, *OUT), "all counts are 0"),
    "a file of something else": (("words.json", *SHAPE, *OUT), "words.json: is not statistics"),
    "a placement as statistics": (("installed.json", *SHAPE, *OUT), "is a placement (format equip"),
    "no output": (("counts.npy", *SHAPE), "-o is needed"),
    "no ranks": (("counts.npy", "--slots", "12", *OUT), "--ranks is needed: counts.npy does"),
    "no slots": (("counts.npy", "--ranks", "4", *OUT), "--slots is needed, or --installed: `eq"),
    "no rank": (
        ("counts.npy", "--ranks", "0", "--slots", "12", *OUT),
        "--ranks must be 1 to 4096, got 0",
    ),
    "too many ranks": (
        ("counts.npy", "--ranks", "9999", *OUT),
        "--ranks must be 1 to 4096, got 9999",
    ),
    "too many slots": (
        ("counts.npy", *SHAPE, "--slots", "9" * 9, *OUT),
        "--slots must be 1 to 65536, got 999999999",
    ),
    "too few slots": (("counts.npy", *SHAPE, "--slots", "4", *OUT), "4 slots cannot hold 8 exp"),
    "slots that do not divide": (("counts.npy", *SHAPE, "--slots", "13", *OUT), "do not divide"),
    "nodes that do not divide": (("counts.npy", *SHAPE, "--nodes", "3", *OUT), "among 3 nodes"),
    "a node to survive, and one node": (
        ("counts.npy", *SHAPE, *OUT, "--survive", "2"),
        "--survive 2 needs --nodes 2 or more, got 1",
    ),
    "a strange loss to survive": (
        ("counts.npy", *SHAPE, *OUT, "--survive", "3"),
        ": error: --survive must be 0 to 2, got 3",
    ),
    "a survival that does not fit": (
        ("counts.npy", *SHAPE, *OUT, "--survive", "1"),
        ": error: --survive 1 needs",
    ),
    "a target below 0": (
        ("counts.npy", *SHAPE, *OUT, "--target", "-1"),
        ": error: --target must be 0 to 1000",
    ),
    "an argument too many": (
        ("counts.npy", "other.npy", *SHAPE, *OUT),
        "unexpected argument 'other.npy': see equipoise plan --help",
    ),
    "weights beyond all memory": (
        ("counts.npy", *SHAPE, *OUT, "--expert-bytes", "999999999T"),
        "expected whole bytes such as 24MiB or 44M, 1 to 2^60, got '999999999T'",
    ),
    "an unknown policy": (("counts.npy", *SHAPE, *OUT, "--policy", "luck"), "got 'luck'"),
    "an unknown split": (
        ("counts.npy", *SHAPE, *OUT, "--split", "odd"),
        "shares or even, got 'odd'",
    ),
    "a target that is no number": (("counts.npy", "--target", "nan"), "expected a number, got 'na"),
    "a negative target": (("counts.npy", *SHAPE, *OUT, "--target", "-1"), "target must be 0 to"),
    "a slack above one": (("counts.npy", *SHAPE, *OUT, "--slack", "2"), "slack must be 0 to 1"),
    "a negative headroom": (
        ("counts.npy", *SHAPE, *OUT, "--headroom", "-1"),
        "--headroom must be 0 to 1000",
    ),
    "a negative sigma": (("counts.npy", *SHAPE, *OUT, "--sigma", "-1"), "--sigma must be 0 to 100"),
    "a cheap node": (("counts.npy", *SHAPE, *OUT, "--node-cost", "0"), "--node-cost must be 1 to"),
    "an unknown survival": (
        ("counts.npy", *SHAPE, *OUT, "--survive", "3"),
        "--survive must be 0 to 2, got 3",
    ),
    "too few to survive": (("counts.npy", *SHAPE, *OUT, "--survive", "1"), "needs two slots an"),
    "no thread": (
        ("counts.npy", *SHAPE, *OUT, "--threads", "0"),
        "--threads must be 1 to 256, got 0",
    ),
    "a crowd of threads": (
        ("counts.npy", *SHAPE, *OUT, "--threads", "9999"),
        "--threads must be 1 to 256, got 9999",
    ),
    "copies of nothing": (("counts.npy", *SHAPE, *OUT, "--max-copies", "1"), "needs --installed"),
    "a byte budget without what a copy weighs": (
        ("counts.npy", "--installed", "installed.json", *OUT, "--byte-budget", "1M"),
        "--byte-budget needs --expert-bytes",
    ),
    "a byte budget for a first placement": (
        ("counts.npy", *SHAPE, *OUT, "--byte-budget", "1M", "--expert-bytes", "1k"),
        "--byte-budget needs --installed",
    ),
    "bytes in an unknown unit": (
        ("counts.npy", *SHAPE, *OUT, "--expert-bytes", "4 parsecs"),
        "--expert-bytes: expected whole bytes such as 24MiB or 44M, 1 to 2^60, got '4 parsecs'",
    ),
    "no bytes": (("counts.npy", *SHAPE, *OUT, "--expert-bytes", "0"), "expected whole bytes"),
    "an unknown objective": (
        ("counts.npy", *SHAPE, *OUT, "--objective", "luck"),
        "tokens or active_experts, got 'luck'",
    ),
    "active experts of a sum": (
        ("sum.npy", *SHAPE, *OUT, "--objective", "active_experts"),
        "active_experts takes recorded routing (batches, layers, experts)",
    ),
    "capacities of other ranks": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "1,1,2"),
        "--capacities: 3 numbers for 4 ranks",
    ),
    "a rank that takes nothing": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "1,1,0,1"),
        "--capacities: rank 2 has 0, which is not a positive number",
    ),
    "a capacity that is no number": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "1,nan,1,1"),
        "--capacities: rank 1 has nan",
    ),
    "a capacity that is a word": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "1,two,1,1"),
        "expected numbers with commas between, or a file, got '1,two,1,1'",
    ),
    "a file of capacities that is missing": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "none.txt"),
        "--capacities: none.txt: cannot be read: No such file",
    ),
    "a file of capacities with a word": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "text.csv"),
        "--capacities: text.csv: number 0 is 'layer'",
    ),
    "a file of capacities that is not text": (
        ("counts.npy", *SHAPE, *OUT, "--capacities", "counts.npy"),
        "--capacities: counts.npy: is not text",
    ),
    "negative copies": (
        ("counts.npy", "--installed", "installed.json", *OUT, "--max-copies", "-1"),
        "--max-copies must be at least 0, got -1",
    ),
    "an installed file that is missing": (
        ("counts.npy", "--installed", "none.json", *OUT),
        "--installed: none.json: cannot be read",
    ),
    "installed on other ranks": (
        ("counts.npy", "--installed", "installed.json", "--ranks", "2", *OUT),
        "--installed: installed.json: is for 4 ranks, not 2",
    ),
    "installed in other slots": (
        ("counts.npy", "--installed", "installed.json", "--slots", "16", *OUT),
        "--installed: has 12 slots, and --slots is 16",
    ),
    "installed for other experts": (
        ("few.npy", "--installed", "installed.json", *OUT),
        "installed.json: places 8 experts, and the statistics are of 4",
    ),
    "installed without a layer": (
        ("counts.npy", "--installed", "one.json", *OUT),
        "one.json: has no layer 1, which the statistics have",
    ),
    "installed on unknown ranks": (
        ("counts.npy", "--installed", "installed.yaml", *OUT),
        "it has to be said beside it, by --ranks",
    ),
    "an unknown suffix": (
        ("counts.npy", *SHAPE, "-o", "new.doc"),
        "-o: new.doc: has a suffix that",
    ),
    "an unknown format": (
        ("counts.npy", *SHAPE, *OUT, "--format", "pdf"),
        "cannot be written as p",
    ),
    "a format of another suffix": (
        ("counts.npy", *SHAPE, *OUT, "--format", "tensorrt-llm"),
        "is written as tensorrt-llm with a suffix of .yaml",
    ),
    "a folder as output": (("counts.npy", *SHAPE, "-o", "."), "-o: . is a folder"),
    "an output over the input": (
        ("counts.npy", *SHAPE, "-o", "counts.npy"),
        "-o: counts.npy is the file that STATS is read from",
    ),
    "one file for two": (
        ("counts.npy", *SHAPE, *OUT, "--json", "./new.json"),
        "--json: new.json is the file that -o is written to",
    ),
    "a word in the configuration": (
        ("counts.npy", *SHAPE, *OUT, "--config", "bad.yaml"),
        "bad.yaml: key 'ranks': expected a whole number",
    ),
    "an unknown key": (
        ("counts.npy", *SHAPE, *OUT, "--config", "unknown.yaml"),
        "unknown key 'rank'; did you mean ranks?",
    ),
    "a zero byte": (("a\0b.npy", *SHAPE, *OUT), "expected a path"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_plan_rejects_bad_input_and_writes_nothing(
    equipoise: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    layout = formats.read_placement("installed.json")
    formats.write_placement("one.json", formats.ExpertPlacement(
        layout.placement[:1], layout.shares[:1], 4
    ))  # fmt: skip
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    answer = equipoise("plan", *arguments)
    assert (answer.code, answer.out) == (2, ""), answer.err
    [line] = answer.err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert message in line
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_plan_writes_placement_and_figures(
    equipoise: Callable[..., Any], statistics: np.ndarray[Any, Any]
) -> None:
    answer = equipoise("plan", "counts.npy", *SHAPE, "-o", "deep/new.json", "--json", "f.json")
    assert answer.code == 0
    placement = formats.read_placement("deep/new.json")
    expected = plan(statistics, slots=12, ranks=4)
    assert placement.digest == expected.digest
    figures = json.loads(Path("f.json").read_text())
    assert figures["digest"] == expected.digest
    assert figures["imbalance"]["planned"] == pytest.approx(expected.predicted_imbalance, abs=1e-4)
    assert figures["imbalance"]["bound"] <= figures["imbalance"]["planned"] + 1e-9
    assert figures["imbalance"]["linear"] > figures["imbalance"]["planned"]
    assert len(figures["by_layer"]["planned"]) == LAYERS
    assert "3 layers of 8 experts in 12 slots on 4 ranks" in answer.out
    assert "nothing installed: 36 slots to fill" in answer.out
    assert answer.err.splitlines() == [
        "placement: deep/new.json, in a new folder",
        "figures: f.json",
    ]


def test_plan_with_zero_copies_keeps_installed_placement(equipoise: Callable[..., Any]) -> None:
    before = formats.read_placement("installed.json")
    same = ("--installed", "installed.json", "-o", "installed.json")
    answer = equipoise("plan", "counts.npy", *same, "--quiet", "--max-copies", "0")
    assert (answer.code, answer.err) == (0, "")
    assert "copies to move: 0 = 0.00% of 36 slots, in 0 of 3 layers" in answer.out
    assert np.array_equal(formats.read_placement("installed.json").placement, before.placement)


def test_plan_warns_when_format_drops_uneven_shares(
    equipoise: Callable[..., Any],
) -> None:
    lossy = equipoise("plan", "counts.npy", *SHAPE, "-o", "a.yaml", "--quiet")
    assert lossy.code == 0
    assert lossy.err == (
        "equipoise: warning: a.yaml: tensorrt-llm does not carry shares, the number of ranks: "
        "lost (--split even plans for engines without them); "
        "tensorrt-llm goes by the model's numbers of layers, which the source does not tell: "
        "0 to 2 are right only where every layer has experts (else plan counts with rows of "
        "zeros for dense layers)\n"
    )
    formats.write_statistics("counts.csv", formats.read_statistics("counts.npy"))
    even_answer = equipoise(
        "plan", "counts.csv", *SHAPE, "-o", "b.yaml", "--quiet", "--split", "even"
    )
    assert (even_answer.code, even_answer.err) == (0, "")


def test_plan_writes_format_chosen_by_name(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("plan", "counts.npy", *SHAPE, *OUT, "--format", "vllm-ascend")
    assert answer.code == 0
    assert formats.read_placement("new.json").source == "vllm-ascend: new.json"


def test_plan_command_line_overrides_config_file(
    equipoise: Callable[..., Any],
) -> None:
    Path("plan.yaml").write_text(
        "ranks: 2\nslots: 12\nout: new.json\npolicy: connected\nsigma: 1\nquiet: true\n"
    )
    answer = equipoise("plan", "counts.npy", "--config", "plan.yaml", "--ranks", "4")
    assert (answer.code, answer.err) == (0, "")
    assert formats.read_placement("new.json").ranks == 4
    assert "policy connected" in answer.out


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        (("--policy", "greedy", "--sigma", "2"), ["--sigma"]),
        (("--policy", "connected", "--target", "0.5", "--node-cost", "3"),
         ["--target", "--node-cost"]),
        (("--slack", "0.5"), ["--slack"]),  # nothing is installed
        (("--headroom", "8"), ["--headroom"]),
        (("--target", "0.5"), ["--target"]),
        (("--target", "0.5", "--split", "even"), []),
        (("--policy", "connected", "--sigma", "0"), []),
    ],
)  # fmt: skip
def test_plan_warns_of_options_that_it_does_not_look_at(
    options: tuple[str, ...], warnings: list[str], equipoise: Callable[..., Any]
) -> None:
    answer = equipoise("plan", "counts.npy", *SHAPE, *OUT, "--quiet", *options)
    assert answer.code == 0
    lines = answer.err.splitlines()
    assert len(lines) == len(warnings)
    for line, flag in zip(lines, warnings, strict=True):
        assert f"{flag} has no effect" in line
    assert "standard deviations" not in answer.out


@pytest.mark.parametrize("split", ["shares", "even"])
def test_plan_headroom_has_an_effect_with_shares_only(
    split: str, equipoise: Callable[..., Any]
) -> None:
    options = ("--installed", "installed.json", "--split", split, "--headroom", "4")
    answer = equipoise("plan", "counts.npy", *options, *OUT, "--quiet")
    assert answer.code == 0
    assert ("--headroom has no effect" in answer.err) == (split == "even")


def test_plan_refuses_recording_without_rows_of_installed_layer(
    equipoise: Callable[..., Any],
) -> None:
    """What it wrote lacked that layer's map, and by place each later layer got another's."""
    counts = np.random.default_rng(4).integers(1, 99, (4, 16))
    even = plan(counts, slots=24, ranks=4, split="even")
    formats.write_placement(
        "now.json", formats.ExpertPlacement(even.placement, even.shares, 4), "vllm-ascend"
    )
    counts[1] = 0
    Path("short.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    options = ("--installed", "now.json", "--split", "even", "-o", "next.json")
    answer = equipoise("plan", "short.json", *options)
    assert answer.code == 2
    assert "of which 1 have no rows there: record for longer" in answer.err
    assert not Path("next.json").exists()


@pytest.mark.parametrize("form", ["sglang", "equipoise"])
def test_plan_pairs_dense_layers_of_installed_sglang_file_by_number(
    form: str, equipoise: Callable[..., Any]
) -> None:
    """It was refused with the advice to record for longer, which gives a dense layer no rows."""
    counts = np.zeros((5, 16), dtype=np.int64)
    counts[[1, 2, 4]] = np.random.default_rng(5).integers(1, 99, (3, 16))
    Path("sgl.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    even = plan(np.random.default_rng(6).integers(1, 99, (4, 16)), slots=24, ranks=4, split="even")
    now = formats.ExpertPlacement(even.placement, even.shares, 4, (1, 2, 3, 4))
    formats.write_placement("location.json", now, "sglang")
    options = ("--installed", "location.json", "--ranks", "4", "--split", "even")
    answer = equipoise("plan", "sgl.json", *options, "--format", form, "-o", "next.json")
    assert answer.code == 0
    written = formats.read_placement("next.json", ranks=4)
    before = even.placement[[0, 1, 3]]
    planned = plan(counts[[1, 2, 4]], slots=24, ranks=4, split="even", installed=before)
    rows = [written.layers.index(layer) for layer in (1, 2, 4)]
    assert written.placement[rows].tolist() == planned.placement.tolist()
    assert written.layers == ((0, 1, 2, 3, 4) if form == "sglang" else (1, 2, 4))
    assert ("layers 0, 3 as installed" in answer.err) == (form == "sglang")
    if form == "sglang":
        assert written.placement[3].tolist() == even.placement[2].tolist()


def test_plan_keeps_installed_layer_without_rows_in_its_own_format(
    equipoise: Callable[..., Any],
) -> None:
    counts = np.random.default_rng(4).integers(1, 99, (3, 16))
    shares = plan(counts, slots=24, ranks=4)
    now = formats.ExpertPlacement(shares.placement, shares.shares, 4)
    formats.write_placement("now.json", now)
    counts[1] = 0
    Path("short.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    options = ("--installed", "now.json", "-o", "next.json", "--json", "figures.json")
    assert equipoise("plan", "short.json", *options).code == 0
    written = formats.read_placement("next.json")
    assert written.layers == (0, 1, 2)
    assert written.shares[1].tolist() == now.shares[1].tolist()
    assert json.loads(Path("figures.json").read_text())["digest"] == written.digest


def test_plan_options_reach_planner(
    equipoise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner_options: dict[str, object] = {}

    def recording(counts: object, **arguments: Any) -> Plan:
        planner_options.update(arguments)
        return plan(counts, **arguments | {"objective": "tokens"})  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "plan", recording)  # which takes not all of them together
    options: dict[str, object] = {
        "nodes": 2, "policy": "connected", "target": 0.5, "slack": 0.25, "headroom": 4,
        "max_copies": 36,
        "node_cost": 2.0, "sigma": 1.5, "threads": 2, "split": "even", "byte_budget": 3 << 20,
        "expert_bytes": 44_000_000, "objective": "active_experts",
        "capacities": (1.0, 1.0, 2.0, 0.5),
    }  # fmt: skip
    option_texts = options | {
        "byte_budget": "3MiB",
        "expert_bytes": "44M",
        "capacities": "1,1,2,.5",
    }
    flags = [word for k, v in option_texts.items() for word in ("--" + k.replace("_", "-"), str(v))]
    assert equipoise("plan", "counts.npy", "--installed", "installed.json", *OUT, *flags).code == 0
    assert {key: planner_options[key] for key in options} == options
    assert (planner_options["ranks"], planner_options["slots"]) == (4, 12)


@pytest.mark.parametrize(
    ("windows", "options", "sigma"),
    [
        (8, (), 1.0), (7, (), 0.0), (8, ("--sigma", "0"), 0.0), (2, ("--sigma", "2"), 2.0),
        (8, ("--policy", "greedy"), 0.0), (8, ("--objective", "active_experts"), 0.0),
    ],
)  # fmt: skip
def test_plan_sigma_default_follows_windows(
    equipoise: Callable[..., Any], windows: int, options: tuple[str, ...], sigma: float
) -> None:
    rng = np.random.default_rng(0)
    np.save("varied.npy", rng.integers(1, 1000, (windows, LAYERS, EXPERTS)))
    answer = equipoise("plan", "varied.npy", *SHAPE, *OUT, "--json", "f.json", *options)
    assert answer.code == 0, answer.err
    assert json.loads(Path("f.json").read_text())["sigma"] == sigma
    assert ("sigma " in answer.out) == (sigma > 0)
    if sigma:
        assert f"sigma {sigma:g}: planned for the mean load of a rank and so" in answer.out


def test_plan_sigma_default_lowers_imbalance_of_windows(equipoise: Callable[..., Any]) -> None:
    """Even and odd experts are busy in turns: the sum alone does not part them."""
    turns = np.ones((8, 1, 8), dtype=np.int64)
    turns[::2, :, ::2], turns[1::2, :, 1::2] = 1000, 1000
    np.save("turns.npy", turns)
    worst = []
    for options in ((), ("--sigma", "0")):
        assert (
            equipoise("plan", "turns.npy", "--ranks", "4", "--slots", "8", *OUT, *options).code == 0
        )
        answer = equipoise(
            "report", "turns.npy", "--placement", "new.json", "--json", "r.json", "--quiet"
        )
        assert answer.code == 0, answer.err
        [line] = [x for x in answer.out.splitlines() if x.startswith("placement, by rank")]
        worst.append(float(line.split()[6]))
    assert worst[0] < worst[1]


def test_plan_option_defaults_match_planner() -> None:
    parameters = inspect.signature(plan).parameters
    request = {field.name: field.default for field in fields(PlanRequest)}
    for name, default in request.items():
        if name in parameters and default not in (None, MISSING):
            assert parameters[name].default == default, name
    options = plan_command.COMMAND.options
    assert set(options) == set(request) - {"statistics"}
    assert tuple(PlanningPolicy) == options["policy"].kind.words
    assert tuple(Split) == options["split"].kind.words
    assert tuple(Objective) == options["objective"].kind.words
    writable_formats = tuple(
        form.name for form in formats.known_formats()[6:] if form.write_suffixes
    )
    assert writable_formats == format_names.PLACEMENT_FORMAT_NAMES


def test_plan_byte_budget_limits_moved_copies(equipoise: Callable[..., Any]) -> None:
    np.save("moved.npy", np.load("counts.npy")[..., ::-1] ** 2)
    installed = ("--installed", "installed.json", "--policy", "connected", "--json", "f.json")
    size_options = (*installed, "--expert-bytes", "1000")
    for budget, most in (("999", 0), ("1999", 1), ("1M", 36)):
        answer = equipoise("plan", "moved.npy", *OUT, *size_options, "--byte-budget", budget)
        assert answer.code == 0
        figures = json.loads(Path("f.json").read_text())
        assert figures["moves"] <= most
        assert (
            figures["bytes_moved"] == 1000 * figures["moves"] <= int(budget.replace("M", "0" * 6))
        )
    assert figures["moves"] > 1, "the last budget is no limit"


def test_plan_capacities_give_larger_ranks_more_load(equipoise: Callable[..., Any]) -> None:
    Path("ranks.txt").write_text("1 1\n1, 3\n")
    for capacities_option in ("1,1,1,3", "ranks.txt"):
        answer = equipoise(
            "plan",
            "counts.npy",
            *SHAPE,
            *OUT,
            "--capacities",
            capacities_option,
            "--json",
            "f.json",
        )
        assert answer.code == 0
        assert "capacities 1 to 3" in answer.out
        expected = plan(np.load("counts.npy"), slots=12, ranks=4, capacities=(1, 1, 1, 3))
        assert formats.read_placement("new.json").digest == expected.digest
        figures = json.loads(Path("f.json").read_text())["imbalance"]
        # The plan's own figure is for what each rank can take; shares are rounded.
        assert figures["planned"] == pytest.approx(expected.predicted_imbalance, abs=1e-4)
        assert figures["planned"] < figures["linear"]
        assert figures["bound"] is None
    greedy_answer = equipoise(
        "plan",
        "counts.npy",
        *SHAPE,
        *OUT,
        "--capacities",
        capacities_option,
        "--policy",
        "greedy",
        "--quiet",
    )
    assert "--capacities: greedy places as if all ranks were equal" in greedy_answer.err


def test_plan_active_experts_objective_counts_experts_per_window(
    equipoise: Callable[..., Any],
) -> None:
    batches = np.zeros((4, 1, 8), dtype=np.int64)
    batches[:, 0, 0], batches[0, 0, 1:] = 1000, 1
    np.save("routing.npy", batches)
    arguments = ("routing.npy", *SHAPE, *OUT, "--objective", "active_experts", "--json", "f.json")
    answer = equipoise("plan", *arguments)
    assert answer.code == 0
    assert "experts that have any rows in a window" in answer.out
    figures = json.loads(Path("f.json").read_text())
    # 4 batches of one expert and one of seven others: 5, 2, 2, 2 on the ranks, in their order.
    assert figures["imbalance"]["linear"] == pytest.approx(5 / (11 / 4) - 1)


def test_plan_table_fits_80_columns(equipoise: Callable[..., Any]) -> None:
    answer = equipoise("plan", "counts.npy", *SHAPE, *OUT)
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize("form", ["vllm-ascend", "vllm", "eplb-table"])
def test_plan_of_sglang_counts_writes_maps_of_moe_layers_only(
    form: str, equipoise: Callable[..., Any]
) -> None:
    """vllm-ascend indexes by MoE layer, so that each took the map of the layer three before."""
    rng = np.random.default_rng(8)
    counts = np.zeros((9, 16), dtype=np.int64)
    counts[3:] = rng.lognormal(5, 1.5, (6, 16)).astype(np.int64)
    Path("decode.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    out = "map.json" if form == "vllm-ascend" else "map.npz"
    options = ("--ranks", "4", "--slots", "24", "--split", "even", "--format", form, "-o", out)
    answer = equipoise("plan", "decode.json", *options)
    assert answer.code == 0
    assert "decode.json: no rows in layers 0..2 (dense?): they are left out" in answer.err
    placement_read = formats.read_placement(out)
    assert placement_read.layers == tuple(range(3, 9))
    own = plan(counts[3:], slots=24, ranks=4, split="even")
    assert placement_read.placement.tolist() == own.placement.tolist()


def test_plan_fits_installed_map_of_moe_layers_by_place(
    equipoise: Callable[..., Any],
) -> None:
    """A recorded map numbers layers with experts from 0; the counts have the model's numbers."""
    rng = np.random.default_rng(9)
    counts = np.zeros((9, 16), dtype=np.int64)
    counts[3:] = rng.lognormal(5, 1.5, (6, 16)).astype(np.int64)
    Path("decode.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    installed_plan = plan(counts[3:], slots=24, ranks=4, split="even")
    layout = formats.ExpertPlacement(installed_plan.placement, installed_plan.shares, 4)
    formats.write_placement("recorded.json", layout, "vllm-ascend")
    options = ("--installed", "recorded.json", "--split", "even", "-o", "next.json")
    assert equipoise("plan", "decode.json", *options).code == 0
    next_layout = formats.read_placement("next.json")
    assert next_layout.layers == tuple(range(3, 9))
    assert next_layout.placement.tolist() == installed_plan.placement.tolist()


def test_plan_takes_ranks_from_statistics_that_name_them(equipoise: Callable[..., Any]) -> None:
    by_rank = np.ones((4, 2, LAYERS, EXPERTS), dtype=np.int64)
    formats.write_statistics("recorded", formats.ExpertStatistics(by_rank.sum(axis=0), (), by_rank))
    assert equipoise("plan", "recorded", "--slots", "12", *OUT).code == 0
    assert formats.read_placement("new.json").ranks == 4
    assert equipoise("plan", "recorded", "--slots", "12", "--ranks", "2", *OUT).code == 0
    assert formats.read_placement("new.json").ranks == 2
    for_eight = plan(np.ones((LAYERS, EXPERTS), dtype=np.int64), slots=16, ranks=8)
    layout = formats.ExpertPlacement(for_eight.placement, for_eight.shares, 8)
    formats.write_placement("eight.json", layout)
    assert equipoise("plan", "recorded", "--installed", "eight.json", *OUT).code == 0
    assert formats.read_placement("new.json").ranks == 8
