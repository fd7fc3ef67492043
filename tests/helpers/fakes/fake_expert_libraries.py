"""The adapters of expert-parallel libraries over stand-ins, with the sizes that those take."""

from dataclasses import replace

from equipoise.hal.capabilities import Available, Probe
from equipoise.hal.expert_parallel import ExpertParallelCapabilities
from equipoise.integrations.expert_parallel.deep_ep import LowLatencyLibrary, NormalLibrary
from equipoise.integrations.expert_parallel.flashinfer import (
    ONE_SIDED,
    TWO_SIDED,
    FlashInferLibrary,
)
from equipoise.integrations.expert_parallel.nccl_ep import LowLatencyLibrary as NcclLowLatency
from equipoise.integrations.expert_parallel.nccl_ep import ThroughputLibrary
from equipoise.integrations.expert_parallel.nixl_ep import NixlLibrary
from equipoise.integrations.expert_parallel.torch_npu import ATLAS_A2, DistributeLibrary

BUFFERS = "helpers.fakes.fake_expert_buffers"


def _on_host(declared: ExpertParallelCapabilities) -> ExpertParallelCapabilities:
    """Any sizes; no rank is lost, and nothing is captured."""
    return replace(declared, hidden_sizes=(), group_sizes=(), masks=False, graph_capture=False)


class FakeNcclLowLatency(NcclLowLatency):
    """NCCL-EP's low-latency algorithm."""

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        return _on_host(super().capabilities)

    def probe(self) -> Probe:
        return Available("a stand-in")


class FakeThroughput(ThroughputLibrary):
    """NCCL-EP's high-throughput algorithm."""

    @property
    def capabilities(self) -> ExpertParallelCapabilities:
        return _on_host(super().capabilities)

    def probe(self) -> Probe:
        return Available("a stand-in")


class FakeFlashInfer(FlashInferLibrary):
    """One of FlashInfer's communications."""

    def probe(self) -> Probe:
        return Available("a stand-in")


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


NCCL_EP = "helpers.fakes.fake_nccl_ep"
NCCL_LOW_LATENCY = FakeNcclLowLatency(module=NCCL_EP)
NCCL_THROUGHPUT = FakeThroughput(module=NCCL_EP)
FLASHINFER = "helpers.fakes.fake_flashinfer"
FLASHINFER_ONE_SIDED = FakeFlashInfer(
    ONE_SIDED.name,
    ONE_SIDED.configuration,
    replace(_on_host(ONE_SIDED.capabilities), masks=True),  # the stand-in can go without ranks
    module=FLASHINFER,
)
FLASHINFER_TWO_SIDED = FakeFlashInfer(
    TWO_SIDED.name, TWO_SIDED.configuration, _on_host(TWO_SIDED.capabilities), module=FLASHINFER
)
NORMAL = FakeNormal(module=BUFFERS)
LOW_LATENCY = FakeLowLatency(module=BUFFERS)
NIXL_EP = FakeNixl(module="helpers.fakes.fake_nixl_ep")
OPERATORS = "helpers.fakes.fake_distribute_operators"
TORCH_NPU = DistributeLibrary(
    "torch-npu", _on_host(ATLAS_A2.capabilities), sends_weights=True, module=OPERATORS
)
TORCH_NPU_A3 = replace(TORCH_NPU, sends_weights=False)
