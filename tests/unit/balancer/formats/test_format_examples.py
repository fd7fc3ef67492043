"""Files written out by hand from what the other systems document, so that a wrong key is seen."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.strategies.format_samples import small_arrangement, small_statistics
from safetensors.numpy import load_file, save_file

from equipoise.balancer import formats
from equipoise.balancer.experts import plan
from equipoise.balancer.formats.placement import ExpertPlacement
from equipoise.balancer.formats.statistics import ExpertStatistics, LayerNumbering
from equipoise.hal.errors import FormatError

EXPERT_MAP = """{
    "moe_layer_count": 2,
    "layer_list": [
        {"layer_id": 0, "device_count": 2, "device_list": [
            {"device_id": 0, "device_expert": [0, 1]},
            {"device_id": 1, "device_expert": [2, 0]}]},
        {"layer_id": 1, "device_count": 2, "device_list": [
            {"device_id": 0, "device_expert": [2, 1]},
            {"device_id": 1, "device_expert": [1, 0]}]}]
}"""
LOAD_BALANCER = """initial_global_assignments:
  3: [0, 1, 2, 0]
  4: [2, 1,
      1, 0]
num_slots: 4
layer_updates_per_iter: 0
"""
ROWS = [[0, 1, 2, 0], [2, 1, 1, 0]]
EVEN = [[32768, 65536, 65536, 32768], [65536, 32768, 32768, 65536]]
LOGICAL_TO_PHYSICAL = [[[0, 3], [1, -1], [2, -1]], [[3, -1], [1, 2], [0, -1]]]
COUNTS = [[2, 1, 1], [1, 2, 1]]
TABLE = [[[2, 0, 3], [1, 1, 0], [1, 2, 0]], [[1, 3, 0], [2, 1, 2], [1, 0, 0]]]


def text_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def layout() -> ExpertPlacement:
    """What the examples say."""
    return ExpertPlacement.with_even_shares(np.array(ROWS, dtype=np.int32), 2)


def test_vllm_ascend_expert_map_is_read_and_written(tmp_path: Path) -> None:
    placement = formats.read_placement(text_file(tmp_path, "map.json", EXPERT_MAP))
    assert placement.same(layout())
    assert placement.shares.tolist() == EVEN
    formats.write_placement(tmp_path / "again.json", placement, "vllm-ascend")
    fields = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert fields == json.loads(EXPERT_MAP)


def test_tensorrt_llm_configuration_is_read_and_written(tmp_path: Path) -> None:
    placement = formats.read_placement(text_file(tmp_path, "a.yaml", LOAD_BALANCER), ranks=2)
    assert (placement.placement.tolist(), placement.layers) == (ROWS, (3, 4))
    formats.write_placement(tmp_path / "b.yaml", placement)
    assert (tmp_path / "b.yaml").read_text(encoding="utf-8") == (
        "initial_global_assignments:\n  3: [0, 1, 2, 0]\n  4: [2, 1, 1, 0]\n"
        "layer_updates_per_iter: 0\nnum_slots: 4\n"
    )


def test_tensorrt_llm_configuration_sets_ranks_by_ep_size(
    tmp_path: Path,
) -> None:
    path = text_file(tmp_path, "a.yaml", LOAD_BALANCER + "ep_size: 2\n")
    assert formats.read_placement(path).ranks == 2


def test_tensorrt_llm_statistics_are_read(tmp_path: Path) -> None:
    meta = '{"num_experts": 3, "num_experts_per_token": 2}'
    text_file(tmp_path, "meta_info.json", meta)
    for rank in range(2):
        rows = {
            f"{iteration}_{layer}": np.array([rank, iteration, layer], dtype=np.int64)
            for iteration in (100, 101)
            for layer in (3, 4)
        }
        save_file(rows, tmp_path / f"rank{rank}.safetensors")
    save_file({"x": np.zeros(1)}, tmp_path / "rank0_raw.safetensors")
    statistics = formats.read_statistics(tmp_path)
    assert statistics.counts.tolist() == [
        [[1, 200, 6], [1, 200, 8]],
        [[1, 202, 6], [1, 202, 8]],
    ]
    assert (statistics.layers, statistics.first_iteration, statistics.top_k) == ((3, 4), 100, 2)
    assert statistics.by_rank is not None
    assert statistics.by_rank[1, 0].tolist() == [[1, 100, 3], [1, 100, 4]]


def test_tensorrt_llm_statistics_are_written(tmp_path: Path) -> None:
    formats.write_statistics(tmp_path / "s", small_statistics(), "tensorrt-llm")
    assert sorted(os.listdir(tmp_path / "s")) == [
        "meta_info.json",
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    meta = json.loads((tmp_path / "s" / "meta_info.json").read_text(encoding="utf-8"))
    assert meta == {"num_experts": 3, "num_experts_per_token": 2}
    rank = load_file(tmp_path / "s" / "rank1.safetensors")
    assert sorted(rank) == ["100_1", "100_3", "101_1", "101_3"]
    assert rank["101_3"].dtype == np.int64
    assert rank["101_3"].tolist() == [21, 22, 23]


@pytest.mark.parametrize("rows", [[[4, 0, 9], [1, 2, 3]], [[[4, 0, 9], [1, 2, 3]]]])
def test_sglang_json_counts_are_read(rows: list[object], tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.json", json.dumps({"logical_count": rows, "rank": 0}))
    assert formats.read_statistics(path).counts.tolist() == [[[4, 0, 9], [1, 2, 3]]]


def test_sglang_torch_counts_are_read(tmp_path: Path) -> None:
    counts = torch.arange(12, dtype=torch.int32).reshape(2, 2, 3)
    record = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    torch.save(record, tmp_path / "expert_distribution_recorder_1.5.pt")
    statistics = formats.read_statistics(tmp_path / "expert_distribution_recorder_1.5.pt")
    assert np.array_equal(statistics.counts, counts.numpy())


def test_sglang_layers_without_rows_are_left_out_with_numbers_kept(tmp_path: Path) -> None:
    rows = [
        [[0, 0, 0], [4, 0, 9], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 2, 3]],
    ]
    path = text_file(tmp_path, "a.json", json.dumps({"logical_count": rows}))
    statistics = formats.read_statistics(path)
    assert (statistics.layers, statistics.empty_layers) == ((1, 3), (0, 2))
    assert statistics.counts.tolist() == [[[4, 0, 9], [0, 0, 0]], [[1, 1, 1], [0, 2, 3]]]


def test_sglang_counts_of_zero_keep_every_layer(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.json", json.dumps({"logical_count": [[0, 0], [0, 0]]}))
    statistics = formats.read_statistics(path)
    assert (statistics.layers, statistics.empty_layers) == ((0, 1), ())


BY_PLACE = (("vllm", ".npz"), ("vllm-ascend", ".json"), ("eplb-table", ".npz"), ("npy", ".npy"))
BY_NUMBER = (("sglang", ".json"), ("tensorrt-llm", ".yaml"))
NUMBERS_OPTIONAL = (("equipoise", ".json"), *BY_PLACE)


@pytest.mark.parametrize(("name", "suffix"), BY_PLACE)
def test_placement_planned_on_sglang_counts_has_rows_by_moe_layer(
    name: str, suffix: str, tmp_path: Path
) -> None:
    """vllm-ascend took entry j for MoE layer j, and entry 0 was that of a dense layer."""
    rng = np.random.default_rng(5)
    counts = np.zeros((61, 16), dtype=np.int64)
    counts[3:] = rng.lognormal(5, 1.5, (58, 16)).astype(np.int64)
    path = text_file(tmp_path, "s.json", json.dumps({"logical_count": counts.tolist()}))
    statistics = formats.read_statistics(path)
    proposal = plan(statistics.counts, slots=24, ranks=4, split="even")
    layout = ExpertPlacement(proposal.placement, proposal.shares, 4, statistics.layers)
    formats.write_placement(tmp_path / f"p{suffix}", layout, name)
    read = formats.read_placement(tmp_path / f"p{suffix}", ranks=4)
    expected = plan(counts[3:], slots=24, ranks=4, split="even")
    assert read.placement.tolist() == expected.placement.tolist()


@pytest.mark.parametrize(("source", "ending"), BY_PLACE)
@pytest.mark.parametrize(("name", "suffix"), BY_NUMBER)
def test_write_by_number_tells_that_source_counts_moe_layers(
    source: str, ending: str, name: str, suffix: str, tmp_path: Path
) -> None:
    """Recorded maps number the layers with experts; 0 is a dense one of the model."""
    path = write_recorded(tmp_path, source, ending)
    loss_message = formats.write_placement(
        tmp_path / f"q{suffix}", formats.read_placement(path, ranks=2), name
    )
    assert "0 to 2 are right only where every layer has experts" in (loss_message or "")


@pytest.mark.parametrize(("middle", "ending"), NUMBERS_OPTIONAL)
@pytest.mark.parametrize(("name", "suffix"), BY_NUMBER)
def test_counts_without_layer_numbers_never_gain_them_on_the_way(
    middle: str, ending: str, name: str, suffix: str, tmp_path: Path
) -> None:
    """A plan of an .npy with the 58 layers that have experts was written as layers 0 to 57."""
    np.save(tmp_path / "counts.npy", np.arange(3 * 4).reshape(3, 4) + 1)
    statistics = formats.read_statistics(tmp_path / "counts.npy")
    for form, file in (("npz", "counts.npz"), ("npy", "again.npy")):
        assert formats.write_statistics(tmp_path / file, statistics, form) is None
        statistics = formats.read_statistics(tmp_path / file)
    assert "0 to 2 are right" in (formats.write_statistics(tmp_path / "c.csv", statistics) or "")
    found = plan(statistics.counts, slots=6, ranks=2, split="even")
    layout = ExpertPlacement(
        found.placement, found.shares, 2, statistics.layers, numbering=statistics.numbering
    )
    assert formats.write_placement(tmp_path / f"m{ending}", layout, middle) is None
    read = formats.read_placement(tmp_path / f"m{ending}", ranks=2)
    for each in (layout, read):
        loss_message = formats.write_placement(tmp_path / f"q{suffix}", each, name)
        assert "0 to 2 are right only where every layer has experts" in (loss_message or "")


def test_counts_with_dense_layers_have_layer_numbers(tmp_path: Path) -> None:
    counts = np.arange(3 * 4).reshape(3, 4)
    counts[0] = 0
    np.save(tmp_path / "counts.npy", counts)
    statistics = formats.read_statistics(tmp_path / "counts.npy").without_empty_layers()
    assert (statistics.layers, statistics.numbering) == ((1, 2), LayerNumbering.MODEL)


@pytest.mark.parametrize(("source", "ending"), BY_PLACE)
@pytest.mark.parametrize(("name", "suffix"), NUMBERS_OPTIONAL)
def test_write_by_place_of_source_by_place_tells_nothing(
    source: str, ending: str, name: str, suffix: str, tmp_path: Path
) -> None:
    layout = formats.read_placement(write_recorded(tmp_path, source, ending), ranks=2)
    assert formats.write_placement(tmp_path / f"q{suffix}", layout, name) is None


@pytest.mark.parametrize(("name", "suffix"), BY_PLACE)
def test_write_by_place_tells_that_sglang_has_rows_of_dense_layers(
    name: str, suffix: str, tmp_path: Path
) -> None:
    text = json.dumps({"physical_to_logical_map": [[0, 1], [1, 0]]})
    layout = formats.read_placement(text_file(tmp_path, "a.json", text), ranks=2)
    loss_message = formats.write_placement(tmp_path / f"q{suffix}", layout, name)
    assert "0 to 1 are right only where every layer has experts" in (loss_message or "")
    assert formats.write_placement(tmp_path / "s.json", layout, "sglang") is None


def write_recorded(folder: Path, name: str, suffix: str) -> Path:
    """Three layers as an engine numbers them that counts those with experts only."""
    layout = ExpertPlacement.with_even_shares(np.array([[0, 1], [1, 0], [0, 1]], dtype=np.int32), 2)
    path = folder / f"recorded{suffix}"
    formats.write_placement(path, layout, name)
    if suffix == ".npz":  # the engine's own maps, without our field of the layers
        arrays = dict(np.load(path))
        arrays.pop("layers", None)
        np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_fortran_ordered_placement_is_read_and_converted(suffix: str, tmp_path: Path) -> None:
    rows = np.asfortranarray([[0, 1, 2, 0], [2, 1, 0, 1], [1, 0, 2, 2]])
    assert not rows.flags.c_contiguous
    path = tmp_path / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, rows)
    else:
        np.savez(path, physical_to_logical_map=rows, ranks=2)
    placement = formats.read_placement(path, ranks=2)
    assert placement.placement.tolist() == rows.tolist()
    formats.write_placement(tmp_path / "b.json", placement)


def test_fortran_ordered_statistics_are_read(tmp_path: Path) -> None:
    counts = np.arange(24).reshape(2, 3, 4).transpose(2, 1, 0)
    np.save(tmp_path / "a.npy", counts)
    read_counts = formats.read_statistics(tmp_path / "a.npy").counts
    assert read_counts.tolist() == counts.tolist()
    assert plan(read_counts, slots=2, ranks=2).moves == 6


@pytest.mark.parametrize("text", ["123", "00000000000000000000123", " +123 ", "1.23e2", "123.0"])
def test_csv_reads_whole_numbers_however_they_are_written(text: str, tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.csv", f"layer,expert,count\n0,0,{text}\n0,1,5\n")
    assert formats.read_statistics(path).counts.tolist() == [[[123, 5]]]


@pytest.mark.parametrize(
    "text", ["1_000", "1_0.0", "9" * 23, "9" * 5000, "-", "", "0x10", "inf", "1e3000"]
)
def test_csv_refuses_what_is_no_whole_number(text: str, tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.csv", f"layer,expert,count\n0,0,{text}\n")
    with pytest.raises(FormatError, match=r"line 2: count is .*, not a whole number"):
        formats.read_statistics(path)


def test_eplb_table_without_layers_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", eplb_table=np.zeros((0, 4, 2), dtype=np.int32), ranks=2)
    with pytest.raises(FormatError, match=r"eplb_table is of shape \(0, 4, 2\)"):
        formats.read_placement(tmp_path / "a.npz")


def test_sglang_placement_is_written_with_a_row_per_layer(tmp_path: Path) -> None:
    formats.write_placement(tmp_path / "a.json", small_arrangement(), "sglang")
    fields = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    trivial_row = [0, 1, 2, 3, 0, 1]
    layer_rows = small_arrangement().placement.tolist()
    rows = [trivial_row, layer_rows[0], trivial_row, layer_rows[1]]
    assert fields == {"physical_to_logical_map": rows}


def test_vllm_maps_are_read_and_written(tmp_path: Path) -> None:
    fields = {
        "physical_to_logical_map": ROWS,
        "logical_to_physical_map": LOGICAL_TO_PHYSICAL,
        "logical_replica_count": COUNTS,
    }
    placement = formats.read_placement(text_file(tmp_path, "a.json", json.dumps(fields)), ranks=2)
    assert placement.same(layout())
    formats.write_placement(tmp_path / "a.npz", placement)
    with np.load(tmp_path / "a.npz") as arrays:
        assert {name: arrays[name].tolist() for name in fields} == fields
        assert arrays["ranks"].item() == 2


def test_vllm_map_of_full_width_is_read(tmp_path: Path) -> None:
    wide = np.full((2, 3, 1024), -1, dtype=np.int64)
    wide[:, :, :2] = LOGICAL_TO_PHYSICAL
    save_file(
        {"physical_to_logical_map": np.array(ROWS), "logical_to_physical_map": wide},
        tmp_path / "a.safetensors",
    )
    assert formats.read_placement(tmp_path / "a.safetensors", ranks=2).same(layout())


def test_ascend_eplb_table_is_read_and_written(tmp_path: Path) -> None:
    text = json.dumps({"eplb_table": TABLE})
    placement = formats.read_placement(text_file(tmp_path, "a.json", text), ranks=2)
    assert placement.same(layout())
    formats.write_placement(tmp_path / "a.safetensors", placement, "eplb-table")
    table = load_file(tmp_path / "a.safetensors")["eplb_table"]
    assert table.dtype == np.int32
    assert table.tolist() == TABLE


def test_csv_counts_are_read_in_any_order(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.csv", "expert,layer,count\n1,5,7\n0,5,3\n\n0,2,1\n1,2,0\n")
    statistics = formats.read_statistics(path)
    assert (statistics.counts.tolist(), statistics.layers) == ([[[1, 0], [3, 7]]], (2, 5))


def test_csv_counts_are_written_with_windows(tmp_path: Path) -> None:
    statistics = ExpertStatistics(
        np.arange(4, dtype=np.int64).reshape(2, 1, 2), (9,), first_iteration=4
    )
    assert formats.write_statistics(tmp_path / "a.csv", statistics) is None
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == (
        "window,layer,expert,count\n4,9,0,0\n4,9,1,1\n5,9,0,2\n5,9,1,3\n"
    )


def test_npy_counts_accept_whole_floats(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1.0, 2.0]], dtype=np.float32))
    assert formats.read_statistics(tmp_path / "a.npy").counts.tolist() == [[[1, 2]]]


def test_npy_placement_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(ROWS, dtype=np.uint8))
    assert formats.read_placement(tmp_path / "a.npy", ranks=2).same(layout())


def test_equipoise_placement_file_has_documented_fields(tmp_path: Path) -> None:
    formats.write_placement(tmp_path / "a.json", layout())
    fields = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert fields["format"] == "equipoise-placement"
    assert [fields[key] for key in ("version", "ranks", "slots", "experts")] == [1, 2, 4, 3]
    assert (fields["layers"], fields["placement"]) == ([0, 1], ROWS)
    assert (fields["shares"], fields["digest"]) == (EVEN, layout().digest)


@pytest.mark.skipif("EQUIPOISE_TRACES" not in os.environ, reason="EQUIPOISE_TRACES names no folder")
def test_sglang_real_statistics_are_read_when_present() -> None:
    paths = sorted(Path(os.environ["EQUIPOISE_TRACES"]).glob("sglang_ep_stats/**/*.json"))
    if not paths:
        pytest.skip("EQUIPOISE_TRACES has no sglang_ep_stats")
    for path in paths:
        statistics = formats.read_statistics(path)
        assert statistics.counts.shape[1:] == (58, 256)
        assert (statistics.layers, statistics.empty_layers) == (tuple(range(3, 61)), (0, 1, 2))
