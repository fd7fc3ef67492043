"""NCCL-EP's group releases what it has taken, also where it cannot be created."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fakes import fake_nccl_ep

from equipoise.hal.expert_parallel import ExpertParallelConfig
from equipoise.integrations.expert_parallel import nccl_ep

CONFIG = ExpertParallelConfig(
    experts=4, top_k=2, hidden=8, max_tokens=3, row_capacity=6, dtype=torch.float32, deadline=1.0
)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was released, in order."""
    names: list[str] = []
    interop = SimpleNamespace(
        get_nccl_comm_from_group=lambda _: SimpleNamespace(
            destroy=lambda: names.append("communicator")
        )
    )
    monkeypatch.setattr("importlib.import_module", lambda _: interop)
    return names


def _open(released: list[str], create: Any) -> nccl_ep.NcclGroup:
    ranks: Any = SimpleNamespace(group=None, size=2, close=lambda: released.append("process group"))
    module = SimpleNamespace(
        __name__="nccl.ep",
        Group=SimpleNamespace(create=create),
        GroupConfig=fake_nccl_ep.GroupConfig,
        Algorithm=fake_nccl_ep.Algorithm,
    )
    return nccl_ep.NcclGroup(CONFIG, ranks, module, "LOW_LATENCY")


def test_group_that_cannot_be_created_releases_communicator_and_process_group(
    released: list[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise fake_nccl_ep.NcclInvalid("no NVLink")

    with pytest.raises(fake_nccl_ep.NcclInvalid, match="no NVLink"):
        _open(released, refuse)
    assert released == ["communicator", "process group"]


def test_close_releases_in_order_and_once(released: list[str]) -> None:
    destroy = SimpleNamespace(destroy=lambda: released.append("group"))
    group = _open(released, lambda *_: destroy)
    assert released == []
    group.close()
    group.close()
    assert released == ["group", "communicator", "process group"]
