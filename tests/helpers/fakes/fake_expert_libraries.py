"""The adapters of expert-parallel libraries over stand-ins, with the sizes that those take."""

from dataclasses import replace

from equipoise.hal.capabilities import Available, Probe
from equipoise.hal.expert_parallel import ExpertParallelCapabilities
from equipoise.integrations.expert_parallel.deep_ep import LowLatencyLibrary, NormalLibrary
from equipoise.integrations.expert_parallel.nixl_ep import NixlLibrary
from equipoise.integrations.expert_parallel.torch_npu import ATLAS_A2, DistributeLibrary

BUFFERS = "helpers.fakes.fake_expert_buffers"


def _on_host(declared: ExpertParallelCapabilities) -> ExpertParallelCapabilities:
    """Any sizes; no rank is lost, and nothing is captured."""
    return replace(declared, hidden_sizes=(), group_sizes=(), masks=False, graph_capture=False)


class FakeNormal(NormalLibrary):
    """DeepEP's normal kernels."""

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        return _on_host(super().capabilities)

    def probe(self) -> Probe:
        return Available("a stand-in")


class FakeLowLatency(LowLatencyLibrary):
    """DeepEP's low-latency kernels."""

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        return _on_host(super().capabilities)

    def probe(self) -> Probe:
        return Available("a stand-in")


class FakeNixl(NixlLibrary):
    """NIXL-EP."""

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        return _on_host(super().capabilities)

    def probe(self) -> Probe:
        return Available("a stand-in")


NORMAL = FakeNormal(module=BUFFERS)
LOW_LATENCY = FakeLowLatency(module=BUFFERS)
NIXL_EP = FakeNixl(module="helpers.fakes.fake_nixl_ep")
OPERATORS = "helpers.fakes.fake_distribute_operators"
TORCH_NPU = DistributeLibrary(
    "torch-npu", _on_host(ATLAS_A2.capabilities), sends_weights=True, module=OPERATORS
)
TORCH_NPU_A3 = replace(TORCH_NPU, sends_weights=False)
