"""Tensors of a device travel over gloo through the host: clauses X4, K3, K5, and the transfer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.harnesses.devices import backend
from helpers.processes.thread_ranks import GroupMember, on_ranks
from helpers.watchdog import WATCHDOG
from torch import Tensor

from equipoise.backends.cpu import BACKEND as CPU
from equipoise.backends.devices.host_staging import HostStagedCommunicator, HostStagedFabric
from equipoise.balancer.experts.balancer import open_balancer
from equipoise.balancer.experts.config import BalancerConfig, ShareMode
from equipoise.balancer.experts.placement import ExpertShape, Layout, even_shares, initial_placement
from equipoise.balancer.experts.planning.migration import (
    LocalCopies,
    RankTransfers,
    Recv,
    RoundTransfers,
    Send,
)
from equipoise.balancer.experts.runtime.jobs import run_blocking
from equipoise.balancer.experts.transfer.p2p import P2PTransfer
from equipoise.hal import registry
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Exchange, PeerBuffer, Rendezvous
from equipoise.hal.errors import CommunicatorFailed, ResultPending, Unsupported
from equipoise.hal.slots import Segment, SlotLayout
from equipoise.hal.stream import Role
from equipoise.integrations.vllm.worker_context import connect_fabric

SIZE = 2
Program = Callable[[GroupMember, Accelerator, HostStagedCommunicator], Any]


def on_devices(kind: str, program: Program, deadline: float = WATCHDOG) -> list[Any]:
    """What each of two ranks returned, which share a device and a host."""

    def serve(member: GroupMember) -> Any:
        device = backend(kind).open(0)
        try:
            fabric = HostStagedFabric(member.fabric, device, deadline)
            return program(member, device, fabric.open("staged"))
        finally:
            device.close()

    return on_ranks(SIZE, serve, deadline)


def to_device(device: Accelerator, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """On the device, and there when this returns: a copy from pageable memory is waited for."""
    return torch.tensor(values, dtype=dtype).to(device.device)


def operations(
    member: GroupMember, device: Accelerator, group: HostStagedCommunicator
) -> dict[str, list[Any]]:
    """What this rank has after each operation, issued on what is on the device."""
    me, peer = member.rank, 1 - member.rank
    own, summed, shared = (to_device(device, [me + 1, 7]) for _ in range(3))
    gathered, turned, uneven = (to_device(device, [[0, 0]] * 2) for _ in range(3))
    pair = to_device(device, [[10 * me, 1], [10 * me + 1, 2]])
    part, incoming = to_device(device, [0, 0]), to_device(device, [0, 0])
    blob, into = to_device(device, [me] * 5, torch.uint8), to_device(device, [9] * 5, torch.uint8)
    group.all_reduce(summed).result(WATCHDOG)
    group.broadcast(shared, 1).result(WATCHDOG)
    group.all_gather(gathered, own).result(WATCHDOG)
    group.reduce_scatter(part, pair).result(WATCHDOG)
    group.all_to_all(turned, pair).result(WATCHDOG)
    rows = [1, 1]
    group.all_to_all_uneven(uneven, pair, rows, rows).result(WATCHDOG)
    works = [group.isend(own, peer), group.irecv(incoming, peer)]
    for work in works:
        work.result(WATCHDOG)
    group.barrier().result(WATCHDOG)
    work = group.exchange(
        Exchange(sends=(PeerBuffer(peer, blob),), receives=(PeerBuffer(peer, into),))
    )
    work.wait(device.stream(Role.COPY))
    device.stream(Role.COPY).synchronize(WATCHDOG)
    assert work.done()
    tensors = {
        "all_reduce": summed,
        "broadcast": shared,
        "all_gather": gathered,
        "reduce_scatter": part,
        "all_to_all": turned,
        "all_to_all_uneven": uneven,
        "irecv": incoming,
        "exchange": into,
    }
    assert {tensor.device.type for tensor in tensors.values()} == {device.device.type}
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def test_host_staged_operations_equal_their_definitions(kind: str) -> None:
    for me, results in enumerate(on_devices(kind, operations)):
        peer = 1 - me
        turned = [[me, 1 + me], [10 + me, 1 + me]]
        assert results == {
            "all_reduce": [3, 14],
            "broadcast": [2, 7],
            "all_gather": [[1, 7], [2, 7]],
            "reduce_scatter": [10 + 2 * me, 2 + 2 * me],
            "all_to_all": turned,
            "all_to_all_uneven": turned,
            "irecv": [peer + 1, 7],
            "exchange": [peer] * 5,
        }


def test_vllm_site_stages_gloo_through_host_only_on_device(kind: str) -> None:
    host = registry.communicator("gloo").host()
    where = Rendezvous(
        rank=0, size=1, host=host.address[0], port=host.address[1], deadline=WATCHDOG
    )
    for accelerator, staged in ((backend(kind).open(0), True), (CPU.open(0), False)):
        fabric = connect_fabric("gloo", where, accelerator)
        assert isinstance(fabric, HostStagedFabric) == staged
        fabric.close()
        accelerator.close()
    host.close()


def test_gloo_alone_refuses_tensor_of_device(kind: str) -> None:
    def program(member: GroupMember, device: Accelerator, _: HostStagedCommunicator) -> bool:
        with pytest.raises(Unsupported, match="a contiguous tensor on cpu is needed"):
            member.fabric.open("plain").all_reduce(to_device(device, [1]))
        return True

    assert on_devices(kind, program) == [True, True]


def test_host_staged_operation_fails_without_peer(kind: str) -> None:
    def program(
        member: GroupMember, device: Accelerator, group: HostStagedCommunicator
    ) -> list[int]:
        if member.rank:
            return []
        incoming = to_device(device, [5])
        work = group.irecv(incoming, 1)
        assert not work.done()
        with pytest.raises(ResultPending):
            work.result(0.0)
        with pytest.raises(CommunicatorFailed):
            work.result(WATCHDOG)
        assert work.done()
        with pytest.raises(CommunicatorFailed):
            work.wait(device.stream(Role.COPY))
        values: list[int] = incoming.tolist()
        return values

    assert on_devices(kind, program, deadline=5.0)[0] == [5]


def test_transfer_stages_weights_of_device_through_host(kind: str) -> None:
    def program(member: GroupMember, device: Accelerator, group: HostStagedCommunicator) -> Any:
        weights = to_device(device, [[member.rank + 1.0] * 16] * 4, torch.float32)
        layout = SlotLayout(tuple((Segment("w", row),) for row in weights), staging=2)
        store = device.slot_store(layout)
        transfer = P2PTransfer(device, group, store, range(SIZE), WATCHDOG)
        peer = 1 - member.rank
        rounds = tuple(
            RoundTransfers(Send(peer, (at,)), Recv(peer, (at,), (2 + at,))) for at in range(2)
        )
        event, compute = device.event(), device.stream(Role.COMPUTE)
        compute.record(event)
        staged = run_blocking(
            transfer.stage(RankTransfers(rounds, LocalCopies((), (), ()), ()), event), WATCHDOG
        )
        store.commit(staged.copies, compute)
        compute.synchronize(WATCHDOG)
        return staged.sent, staged.received, weights[:, 0].tolist()

    (sent_bytes, received_bytes, first), (sent_back, received_back, second) = on_devices(
        kind, program
    )
    assert (first, second) == ([1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 1.0, 1.0])
    assert (sent_bytes, sent_back) == (received_back, received_bytes)


def test_engine_rebalances_device_through_host(kind: str) -> None:
    """Loads are summed and experts moved over gloo; every slot then holds its expert's weights."""
    shape = ExpertShape(layers=1, experts=8, slots=10, ranks=SIZE)
    config = BalancerConfig(
        name="staged", shares=ShareMode.LAGGED, window_size=2, step_interval=4, sub_window=2
    )
    layout = Layout(initial_placement(shape), even_shares(initial_placement(shape), shape.experts))

    def serve(member: GroupMember) -> tuple[list[list[int]], list[float], int]:
        device = backend(kind).open(0)
        mine = slice(member.rank * shape.slots_per_rank, (member.rank + 1) * shape.slots_per_rank)
        weights = to_device(
            device, [[float(e)] * 16 for e in layout.placement[0, mine]], torch.float32
        )
        store = device.slot_store(SlotLayout(tuple((Segment("w", w),) for w in weights), staging=5))
        fabric = HostStagedFabric(member.fabric, device, WATCHDOG)
        balancer = open_balancer(device, fabric, store, shape, layout, config)
        ids = to_device(device, [[1], [2], [1], [2], [1], [3], [2], [1]], torch.int32)
        compute = device.stream(Role.COMPUTE)
        for step in range(24):
            with balancer.step(step):
                compute.launch(lambda at=step: balancer.router.route(0, at, ids))  # type: ignore[misc]
            compute.synchronize(WATCHDOG)
        committed = [report for report in balancer.engine.reports if report.copies]
        placement = balancer.serving_state.layout.placement.tolist()
        balancer.close()
        slot_values: list[float] = weights[:, 0].tolist()
        device.close()
        return placement, slot_values, len(committed)

    (placement, first, rebalances), (other, second, _) = on_ranks(SIZE, serve, WATCHDOG)
    assert rebalances > 0
    assert placement == other != layout.placement.tolist()
    assert placement == [[int(expert) for expert in first + second]]
