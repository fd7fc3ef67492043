"""Layers that never ask for slots are found: by what they are, and by what they did."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.settings import EplbSettings

pytestmark = pytest.mark.filterwarnings("ignore")

UNSUPPORTED = {
    "reload_weights": "relies on the slots",
    "update_weights": "relies on the slots",
    "save_sharded_state": "relies on the slots",
    "save_tensorized_model": "relies on the slots",
    "checkpoint_prepare": "ends vLLM's groups",
}


class MegaMoe:
    """An expert path of its own, as some models have."""


def layer(router: object, monolithic: bool = False, together: bool = False) -> Any:
    method = SimpleNamespace(is_monolithic=monolithic)
    experts = SimpleNamespace(quant_method=method)
    return SimpleNamespace(
        router=router, routed_experts=experts, do_naive_dispatch_combine=together
    )


def model(*layers: object) -> Any:
    return SimpleNamespace(
        moe_layers=layers,
        expert_weights=[[] for _ in layers],
        num_local_physical_experts=2,
        num_logical_experts=2,
    )


def own_router() -> Any:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    kind: Any = type("Chooses", (BaseRouter,), {})
    kind.__abstractmethods__ = frozenset()
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (MegaMoe, "layer 0: MegaMoe routes by itself"),
        (lambda: layer(object()), "layer 0: SimpleNamespace routes by itself"),
        (lambda: layer(own_router(), monolithic=True), "layer 0: .* routes within its kernel"),
        (lambda: layer(own_router(), together=True), "layer 0: .* the rows of all ranks together"),
    ],
)
def test_expert_model_refuses_layer_that_cannot_ask_for_slots(
    make: Callable[[], object], message: str
) -> None:
    from equipoise.integrations.vllm.eplb.model import expert_model

    with pytest.raises(IntegrationError, match=message):
        expert_model(model(make()), "refused", torch.device("cpu"))


def served_by(coverage: str, rows: list[Any]) -> Any:
    from equipoise.integrations.vllm.eplb.router import StepCounter
    from equipoise.integrations.vllm.eplb.state import BalancedModel, LayerCoverage

    placeholder: Any = SimpleNamespace()
    return BalancedModel(
        placeholder,
        placeholder,
        (),
        StepCounter(),
        (),
        placeholder,
        LayerCoverage(coverage),
        routers=rows,
    )


def test_draft_model_may_skip_layers_but_not_all() -> None:
    rows = [SimpleNamespace(was_called=was_called) for was_called in (False, False)]
    served = served_by("some layer", rows)
    served.set_unpadded_rows([3])
    with pytest.raises(IntegrationError, match=r"layers \[0, 1\] of 2"):
        served.verify_routed()
    rows[0].was_called = True
    assert served.verify_routed()


def test_served_model_names_layer_computed_without_asking() -> None:
    rows = [SimpleNamespace(was_called=was_called) for was_called in (True, False, True)]
    served = served_by("every layer", rows)
    assert not served.verify_routed(), "no forward with tokens has come by"
    served.set_unpadded_rows([3])
    with pytest.raises(IntegrationError, match=r"layers \[1\] of 3 .* without asking"):
        served.verify_routed()
    rows[1].was_called = True
    assert served.verify_routed()


def test_model_runners_get_engine_state_only_for_configured_worker() -> None:
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.eplb_utils import EPLBController

    from equipoise.integrations.vllm.eplb.install import install_eplb_state
    from equipoise.integrations.vllm.eplb.state import EquipoiseEplbState

    ours, theirs = (SimpleNamespace(enable_eplb=True, eplb_config=SimpleNamespace()) for _ in "ab")
    device = torch.device("cpu")
    config = SimpleNamespace(parallel_config=ours, model_config=object())
    worker = SimpleNamespace(vllm_config=config, **dict.fromkeys(UNSUPPORTED, lambda: None))
    with install_eplb_state(worker, EplbSettings()):
        second = EPLBController(ours, device)
        second.prepare_load()
        assert type(second.state) is EquipoiseEplbState
        assert type(gpu_model_runner.EplbState(ours, device)) is EquipoiseEplbState
        assert type(gpu_model_runner.EplbState(theirs, device)) is EplbState
        for name, reason in UNSUPPORTED.items():
            with pytest.raises(IntegrationError, match=f"{name} {reason}"):
                getattr(worker, name)()
    assert type(gpu_model_runner.EplbState(ours, device)) is EplbState
