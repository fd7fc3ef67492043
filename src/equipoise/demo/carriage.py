"""How the demo's weights come into slots: from peers, or from one copy in the host's memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from equipoise.balancer.experts.balancer import InPlaceFromHost, StagedFromPeers, UpdatePathConfig
from equipoise.balancer.experts.config import CommitMode
from equipoise.balancer.experts.host_pool.layout import PoolLayout
from equipoise.balancer.experts.host_pool.pool import HostExpertPool, ranks_on_node
from equipoise.balancer.experts.placement import ExpertShape
from equipoise.balancer.experts.transfer.copy_threads import CopyThreadPool
from equipoise.balancer.experts.transfer.host_writes import (
    CpuWriter,
    HostWeights,
    SlotWriter,
    StreamWriter,
)
from equipoise.balancer.experts.weights.expert_weights import LayerGroup
from equipoise.demo.site import Site
from equipoise.hal import registry
from equipoise.hal.slots import SlotStore


@contextmanager
def carriage(
    site: Site, name: str, family: LayerGroup, store: SlotStore, shape: ExpertShape
) -> Iterator[UpdatePathConfig]:
    """The way that the run asks for, and what it takes as long as it is used; collective.

    Args:
        site: where this rank serves.
        name: of what is served; a pool's.
        family: of the slots.
        store: of the slots.
        shape: how many of everything.

    Raises:
        ExpertPoolError: there is no room for a copy of all experts in this machine's memory.
        ControlError: a rank did not come.
    """
    if site.settings.commit is CommitMode.STAGED:
        yield StagedFromPeers()
        return
    pool = _pool(site, name, family, shape)
    # The ranks of a machine share its cores, and so do their copiers.
    with CopyThreadPool.near(site.accelerator.topology(), accelerators=len(pool.ranks)) as copier:
        supply = HostWeights(pool, _writer(site, copier, store))
        yield InPlaceFromHost(supply, registry.accelerator(site.settings.backend).capabilities)
    pool.close()


def _writer(site: Site, copier: CopyThreadPool, store: SlotStore) -> SlotWriter:
    if site.accelerator.device.type == "cpu":
        return CpuWriter(copier, store, site.post.deadline)
    return StreamWriter(site.accelerator, store)


def _pool(site: Site, name: str, family: LayerGroup, shape: ExpertShape) -> HostExpertPool:
    """Every expert once in this machine's memory, each written by one of its ranks."""
    control, deadline, weights = site.post.control, site.post.deadline, site.post.weights
    ranks = ranks_on_node(control, site.accelerator.topology(), name=name, timeout=deadline)
    layout = PoolLayout(family.descriptor, shape.layers, shape.experts)
    pool = HostExpertPool.open(control, ranks, layout, name=name, timeout=deadline)
    for layer, expert in pool.owned():
        parts = {"gate_up": weights.gate_up[layer, expert], "down": weights.down[layer, expert]}
        pool.write(layer, expert, family.sources(parts))
    pool.seal(deadline)
    return pool
