"""Every bad placement is one FormatError that names file, layer and value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.strategies.format_samples import fails, file_of_arrangement

import equipoise
from equipoise.balancer import formats
from equipoise.balancer.formats import encodings
from equipoise.hal.errors import PlacementError

GOOD_MAP: dict[str, Any] = {
    "moe_layer_count": 1,
    "layer_list": [
        {
            "layer_id": 7,
            "device_count": 2,
            "device_list": [
                {"device_id": 0, "device_expert": [0, 1]},
                {"device_id": 1, "device_expert": [2, 0]},
            ],
        }
    ],
}
YAML = "num_slots: 4\ninitial_global_assignments:\n  3: [0, 1, 2, 0]\n"


def two_ranks(path: Path) -> object:
    return formats.read_placement(path, ranks=2)


@pytest.mark.parametrize(
    ("rows", "ranks", "words"),
    [
        ([[0, 1, 2, 9]], 2, "layer 0, slot 3: expert 9 is unknown: 4 slots hold experts 0 to 3"),
        ([[0, 1, 2, -1]], 2, "layer 0, slot 3: expert -1 is unknown"),
        ([[0, 1, 2, 0], [0, 1, 1, 0]], 2, "layer 1 has no slot for expert 2"),
        ([[0, 1, 2, 0]], 3, "4 slots do not divide among 3 ranks"),
        ([[0, 1, 2, 0]], None, "does not say how many ranks there are"),
        ([[0, 1, 2, 0]], 0, "ranks must be at least 1, got 0"),
        ([[0, 1], [0]], 2, "layer 1 has 1 entries, expected 2"),
        ([[0, 5000000000]], 2, "layer 0, slot 1: 5000000000 is out of range"),
    ],
)
def test_read_placement_refuses_bad_placement(
    rows: object, ranks: int | None, words: str, tmp_path: Path
) -> None:
    text = json.dumps({"physical_to_logical_map": rows})
    what = fails(tmp_path / "a.json", text, lambda path: formats.read_placement(path, ranks=ranks))
    assert words in what


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logical_replica_count": [[2, 2, 1]]}, "layer 0, expert 1: logical_replica_count has 2"),
        ({"logical_to_physical_map": [[[0, 3], [2, -1], [1, -1]]]}, "layer 0, expert 1: logical_"),
        ({"logical_to_physical_map": [[[0, 3], [1, -1]]]}, "is (1, 2, 2), of physical_to_logical_"),
        ({"ranks": 4}, "is for 4 ranks, not 2"),
        ({"layers": [1, 2]}, "2 numbers of layers for 1 layers"),
        ({"layers": [-1]}, "layer -1 is outside 0 to 65535"),
        ({"layers": [65536]}, "layer 65536 is outside 0 to 65535"),
    ],
)
def test_read_placement_refuses_inconsistent_maps(
    fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    text = json.dumps({"physical_to_logical_map": [[0, 1, 2, 0]], **fields})
    assert words in fails(tmp_path / "a.json", text, two_ranks)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[2, 0, 3], [1, 1, 0], [1, 3, 0]], "expert 2 has slot 3, as has expert 0"),
        ([[2, 0, 4], [1, 1, 0], [1, 2, 0]], "layer 0: expert 0 has slot 4 of 4"),
        ([[3, 0, 3], [1, 1, 0], [1, 2, 0]], "layer 0, expert 0 has 3 copies in 2 columns"),
        ([[2, 0, 3], [0, 1, 0], [1, 2, 0]], "layer 0, expert 1 has 0 copies in 2 columns"),
        ([[1], [1]], "an expert needs two columns"),
    ],
)
def test_read_placement_refuses_bad_eplb_table(
    rows: list[list[int]], words: str, tmp_path: Path
) -> None:
    assert words in fails(tmp_path / "a.json", json.dumps({"eplb_table": [rows]}), two_ranks)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("moe_layer_count",), 2, "moe_layer_count is 2, and layer_list has 1"),
        (("layer_list",), [], "layer_list is [], not a list of objects"),
        (("layer_list", 0, "layer_id"), "x", "entry 0 of layer_list: layer_id is 'x', not a whole"),
        (("layer_list", 0, "device_count"), 3, "layer 7: device_count is 3, and there are 2"),
        (("layer_list", 0, "device_list", 1), 5, "layer 7: device_list holds 5, not objects"),
        (("layer_list", 0, "device_list", 1, "device_id"), 0, "layer 7: device_id is not 0 to 1"),
        (("layer_list", 0, "device_list", 1, "device_expert"), [2], "layer 7: device 1 has 1 entr"),
        (("layer_list", 0, "device_list", 1, "device_expert", 0), 1, "has no slot"),
        (("layer_list", 0, "device_list", 1, "device_expert", 0), 8, "layer 7, slot 2: expert 8"),
    ],
)
def test_read_placement_refuses_bad_expert_map(
    path: tuple[str | int, ...], value: object, words: str, tmp_path: Path
) -> None:
    expert_map = json.loads(json.dumps(GOOD_MAP))
    parent = expert_map
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    if words == "has no slot":
        expert_map["layer_list"][0]["device_list"][0]["device_expert"] = [0, 3]
    assert words in fails(tmp_path / "a.json", json.dumps(expert_map), formats.read_placement)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (YAML.replace("2, 0]", "2]"), "layer 3 has 3 slots, num_slots is 4"),
        (YAML.replace("2, 0]", "2, x]"), "layer 3: slot 3 is 'x', not a whole number"),
        (YAML.replace("2, 0]", "2, 1.0]"), "layer 3: slot 3 is '1.0', not a whole number"),
        (YAML.replace("2, 0]", "2, -1]"), "layer 3, slot 3: expert -1 is unknown"),
        (YAML.replace("2, 0]", "1, 0]").replace("1, 1", "3, 1"), "layer 3 has no slot for exper"),
        (YAML.replace("3:", "three:"), "'three' is not the number of a layer"),
        (YAML + "  3: [0, 1, 2, 0]\n", "key '3' is given twice"),
        (YAML + "  03: [0, 1, 2, 0]\n", "layer 3 is given twice"),
        (YAML.replace("num_slots: 4", "a: 1"), "has no field num_slots"),
        (YAML + "layer_updates_per_iter: -1\n", "layer_updates_per_iter is -1, below 0"),
        ("num_slots: 4\ninitial_global_assignments:\n", "is None, not a mapping of layers"),
        ("num_slots: 4\n", "is not a placement: has none of the fields initial_global"),
        ("a: &x [1]\nb: *x\n", "refers to the anchor 'x'"),
        ("a: " + "[" * 5000, "nested deeper than 8 levels"),
        ("a: [1, 2", "is not YAML: "),
        ("- 1\n", "holds [1], not a mapping"),
        ("\t\n", "is not YAML: "),
    ],
)
def test_read_placement_refuses_bad_yaml(text: str, words: str, tmp_path: Path) -> None:
    assert words in fails(tmp_path / "a.yaml", text, two_ranks)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("digest", "0" * 32, "digest is '000"),
        ("ranks", 2, "seal is "),
        ("layers", [1, 4], "seal is "),
        ("version", 2, "is of version 2, not 1"),
        ("format", "other", "format is 'other', not 'equipoise-placement'"),
        ("slots", 7, "says 7 slots, and has 6"),
        ("shares", [[1] * 6] * 2, "layer 1: shares of expert 0 sum to 2, not 65536"),
        ("shares", [[-1] * 6] * 2, "layer 1, slot 0: share -1 is not 0 to 65536"),
        ("shares", [[1] * 5] * 2, "shares are int32 (2, 6), got int32 (2, 5)"),
    ],
)
def test_read_placement_refuses_bad_equipoise_file(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    path = file_of_arrangement(tmp_path, "equipoise", ".json")
    fields = {**json.loads(path.read_bytes()), key: value}
    assert words in fails(path, encodings.encode_json(fields), formats.read_placement)


ROW = np.array([[0, 1]], dtype=np.int32)
WHOLE = np.full((1, 2), 65536, dtype=np.int32)
COUNTS = np.ones((1, 1, 4), dtype=np.int64)
ARGUMENTS: list[tuple[Callable[[], object], str]] = [
    (lambda: equipoise.ExpertShape(1.0, 8, 12.0, 2), "layers must be a whole number, got 1.0"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertPlacement(ROW, WHOLE, 1, (1.5,)), "layers must be a whole number"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertPlacement(ROW, WHOLE, "1"), "ranks must be a whole number, got '1'"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertPlacement([[0, 1]], WHOLE, 1), "placement must be of type ndarray"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertPlacement(ROW, [[1, 1]], 1), "shares must be of type ndarray"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertStatistics([[[1]]]), "counts must be of type ndarray, got [[[...]]]"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertStatistics(COUNTS, first_iteration=1.5), "first_iteration must be a"),  # type: ignore[arg-type]
    (lambda: equipoise.ExpertStatistics(COUNTS, top_k=2.5), "top_k must be a whole number, got 2"),  # type: ignore[arg-type]
    (lambda: equipoise.read_placement("none.json", ranks="2"), "ranks must be a whole number"),  # type: ignore[arg-type]
    (lambda: equipoise.read_placement("none.json", ranks=True), "ranks must be a whole number"),
    (lambda: equipoise.write_placement("p.json", ROW), "placement must be of type ExpertPlacement"),  # type: ignore[arg-type]
    (lambda: equipoise.write_statistics("s.npz", 3), "statistics must be of type ExpertStatistics"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), ARGUMENTS, ids=[text for _, text in ARGUMENTS])
def test_argument_of_other_type_is_refused_by_name(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(PlacementError) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
