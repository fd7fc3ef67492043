"""Scales that would not move with an expert have to be one and the same, and are named if not."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.eplb.model import SHARED_SCALES, check_shared_scales, shared_scales

AGAIN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
NAMES = [f"layers.{number}.{name}" for number in range(3) for name in SHARED_SCALES]
VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank, for tensors of the host."""
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", limit, world_size=1, rank=0)
    yield dist.group.WORLD
    dist.destroy_process_group()


def layer(**scales: Any) -> Any:
    return SimpleNamespace(routed_experts=SimpleNamespace(**scales))


@AGAIN
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES)))
def test_check_scales_names_scales_that_differ_among_experts(
    alone: Any, values_by_name: dict[str, list[float]]
) -> None:
    differing_names = [name for name, values in values_by_name.items() if len(set(values)) > 1]
    given_scales = [(name, torch.tensor(values)) for name, values in values_by_name.items()]
    if not differing_names:
        check_shared_scales(given_scales, alone)
        return
    with pytest.raises(IntegrationError, match="scales differ") as error:
        check_shared_scales(given_scales, alone)
    assert str(error.value).endswith(f": {differing_names}")


def test_check_scales_names_scales_that_differ_between_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_two(ends: Tensor, op: Any, group: object) -> None:
        assert (op, group) == (dist.ReduceOp.MAX, "both")
        ends.copy_(torch.maximum(ends, torch.tensor([[2.0, -2.0], [1.0, -1.0]])))

    monkeypatch.setattr(dist, "all_reduce", of_two)
    here = [("layers.0.a", torch.ones(3)), ("layers.0.b", torch.ones(3))]
    with pytest.raises(IntegrationError, match=r": \['layers\.0\.a'\]$"):
        check_shared_scales(here, "both")


def test_check_scales_skips_collective_without_scales() -> None:
    model: Any = SimpleNamespace(moe_layers=[layer(w13_input_scale=None), layer()])
    assert shared_scales(model) == []
    check_shared_scales(shared_scales(model), None)


def test_scales_lists_only_known_scales_with_values() -> None:
    first = layer(w13_input_scale=torch.ones(2), w2_input_scale=torch.ones(0), other=torch.ones(2))
    second = layer(w2_input_scale=torch.ones(()))
    scales = shared_scales(SimpleNamespace(moe_layers=[first, second]))
    assert [name for name, _ in scales] == ["layers.0.w13_input_scale", "layers.1.w2_input_scale"]
