"""What stands where vLLM's runner has its `EplbState`: our engine, called as the runner calls it.

runner                                  here
add_model(model)          collective    register its tensors, open a balancer, boundary 0
prepare_forward(n)        host          how many rows hold a token
forward                   device        `LayerState.map_and_record`, layer by layer
step(is_dummy)            host          the boundary before the next step
"""

from typing import Any

import torch
from vllm.distributed.parallel_state import get_ep_group, get_pp_group, get_tp_group

from equipoise.balancer.experts.closing import close_all
from equipoise.balancer.experts.open import ModelStart, open_balancers
from equipoise.balancer.experts.weights.memory_spans import ModelSet
from equipoise.balancer.observe import metrics
from equipoise.hal.errors import IntegrationError
from equipoise.integrations.vllm.engine_config import engine_config, node_count, staging_budget
from equipoise.integrations.vllm.engine_model import expert_model, initial_layout, rows_alike
from equipoise.integrations.vllm.engine_scales import check_scales, scales
from equipoise.integrations.vllm.engine_served import (
    Asks,
    Couriers,
    Served,
    unfilled,
)
from equipoise.integrations.vllm.routed_rows import Clock
from equipoise.integrations.vllm.settings import EngineSettings
from equipoise.integrations.vllm.site import Site, open_site


class EngineState:
    """Our engine, for one worker.

    Args:
        parallel_config: vLLM's; its `eplb_config` says window and interval, in steps.
        device: the worker's.
        settings: of the part.
        target: configuration of the model that is served; others are drafts.
    """

    is_async = False
    """vLLM need not start anything: what works beside the forward is ours."""

    def __init__(
        self, parallel_config: Any, device: torch.device, settings: EngineSettings, target: Any
    ):
        self.parallel_config = parallel_config
        self.device = device
        self._settings = settings
        self._target = target
        self._site: Site | None = None
        self._registry: Any | None = None
        self._exporter: metrics.Exporter | None = None
        self.model_states: dict[str, Served] = {}
        """By the hash of the model's configuration, as vLLM has them."""
        self._unproven: list[Served] = []
        """Models whose layers have still to be seen asking for slots."""
        self._by_config: dict[int, tuple[Any, Served]] = {}
        """By the id of the configuration, which is kept beside: every forward asks, and to hash one
        takes longer than a step's other work on the host."""

    @torch.inference_mode(False)
    def add_model(self, model: Any, model_config: Any, model_name: str | None = None) -> None:
        """Balance a model that has its weights; collective over the expert-parallel group.

        Raises what `expert_model` and `open_balancers` raise.
        """
        site = self._met()
        self._tell(model)
        number = len(self.model_states)
        made = expert_model(model, f"model{number}", self.device)
        group = get_ep_group()
        check_scales(scales(model), group.cpu_group)
        alike = rows_alike(model, group.world_size, get_tp_group().world_size)
        eplb, nodes = self.parallel_config.eplb_config, node_count(site.nodes_of_ranks)
        config = engine_config(self._settings, eplb, number, alike, nodes)
        couriers = Couriers(config, group.rank_in_group, self._metrics(group.rank_in_group))
        balancers = open_balancers(
            site.accelerator,
            site.fabric,
            ModelSet((made,)),
            {made.name: ModelStart(initial_layout(model), config)},
            budget=staging_budget(self._settings, made.groups),
            journals=couriers,
        )
        balancer = balancers[made.name]
        before = [counters.clone() for counters in balancer.counters]
        filled = unfilled(max(1, self.parallel_config.num_ubatches), self.device)
        asks = Asks.EVERY_LAYER if model_config is self._target else Asks.SOME_LAYER
        served = Served(balancer, couriers, filled, Clock(), before, site.streams, asks)
        served.route(model)
        with site.streams.turn():
            served.open_step()
        self._unproven.append(served)
        self.model_states[model_config.compute_hash()] = served
        self._by_config[id(model_config)] = model_config, served

    def prepare_forward(
        self, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None
    ) -> None:
        """The next forward of a model has so many rows with a token."""
        known = self._by_config.get(id(model_config))
        if known is None:
            # The configuration was replaced: whose rows these are, nobody says.
            for served in self.model_states.values():
                served.fill_all()
            return
        served = known[1]
        if not served.clock.announced:
            with self._met().streams.turn():
                served.forget_step()  # what engines warm up with is nobody's traffic
        served.fill(_rows(num_unpadded_tokens, ubatch_slices))

    @torch.inference_mode(False)
    def step(
        self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        """A forward was launched: the boundary before the next one.

        Args:
            is_dummy: it carried nobody's tokens.
            is_profile: it only measures memory; ours was taken when the model came.
            log_stats: the configuration says so, and our lines have read it there.

        Raises what `ModelBalancer.before_step` raises: a rank that cannot know what was agreed
        ends. And `IntegrationError` where a layer never asks for slots.
        """
        if is_profile:
            return
        self._unproven = [served for served in self._unproven if not served.proven()]
        with self._met().streams.turn():
            for served in self.model_states.values():
                if is_dummy:
                    served.forget_step()
                served.clock.step += 1
                served.open_step()

    def start_async_loop(self) -> None:
        """Nothing: threads of ours have started."""

    def rearrange(self, *_: Any, **__: Any) -> None:
        """Raises: who asks scales the group up or down."""
        raise IntegrationError("equipoise does not follow elastic expert parallelism")

    def close(self) -> None:
        """End all engines, and part from the other ranks; bounded."""
        served, self.model_states = list(self.model_states.values()), {}
        self._by_config.clear()
        close_all(served)
        if self._exporter is not None:
            self._exporter.close()
        if self._site is not None:
            self._site.close()
            self._site = None

    def _metrics(self, rank: int) -> Any | None:
        """Where metrics are kept; answers on the port from the first model on."""
        port = self._settings.metrics_port
        if port is None:
            return None
        if self._registry is None:
            metrics.require()
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()
            stage, ranks = get_pp_group().rank_in_group, get_ep_group().world_size
            self._exporter = metrics.export(self._registry, port + stage * ranks + rank)
        return self._registry

    def _met(self) -> Site:
        if self._site is None:
            deadline, communicator = self._settings.deadline, self._settings.communicator
            self._site = open_site(get_ep_group(), self.device, deadline, communicator)
        return self._site

    def _tell(self, model: Any) -> None:
        """Have the model list what moves; it takes tables for that, which nobody reads here."""
        layers, slots = len(model.moe_layers), model.num_physical_experts
        counts = torch.zeros(layers, slots, dtype=torch.int32, device=self.device)
        nobody = torch.full((layers, model.num_logical_experts, 1), -1, device=self.device)
        model.set_eplb_state(counts, nobody, nobody[..., 0])
        enabled = torch.zeros((), dtype=torch.bool, device=self.device)
        for layer in model.moe_layers:
            if layer.eplb_state is None:
                raise IntegrationError(f"a layer takes no state of a balancer: {layer}")
            layer.eplb_state.should_record_tensor = enabled


def _rows(tokens: int, ubatch_slices: Any) -> list[int]:
    """Rows with a token by micro-batch."""
    if ubatch_slices is None:
        return [tokens]
    slices = [each.token_slice for each in ubatch_slices]
    return [max(0, min(tokens, cut.stop) - cut.start) for cut in slices]
