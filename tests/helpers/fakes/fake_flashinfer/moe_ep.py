"""Communications with the contract of `MoEEpCommunication`, over gloo.

What that contract leaves open is junk: rows without a token, their weights, and the order of rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from helpers.fakes.fake_expert_buffers import Place, gather
from torch import Tensor


@dataclass(frozen=True)
class BootstrapConfig:
    world_size: int
    rank: int
    device: int | None = None
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class MoEEpCommParams:
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    invalid_expert_id: int = -1


@dataclass(frozen=True)
class MoEEpDispatchResult:
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    tokens_per_rank: int


@dataclass
class NVLinkOneSidedConfig:
    backend_name: str = "nvlink_one_sided"
    enable_rank_mask: bool = False


@dataclass
class NVLinkTwoSidedConfig:
    backend_name: str = "nvlink_two_sided"


@dataclass(frozen=True)
class Step:
    """What a combine needs of its dispatch: by row the place of its token, and the tokens here."""

    places: dict[int, Place]
    tokens: int


class TwoSided:
    """Choices of other ranks arrive as invalid ones."""

    keeps_foreign_ids = False

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: Any) -> None:
        assert params.num_experts % bootstrap.world_size == 0
        assert bootstrap.process_group is not None
        self.params = params
        self.rank, self.size = bootstrap.rank, bootstrap.world_size
        self._check(params)
        self._group = bootstrap.process_group
        self._step: Step | None = None

    def _check(self, params: MoEEpCommParams) -> None:
        assert params.num_experts % 4 == 0

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None = None
    ) -> MoEEpDispatchResult:
        if self._step is not None:
            raise RuntimeError("dispatch called twice without an intervening combine")
        assert topk_weights is not None
        most, local = self.params.max_tokens_per_rank, self.params.num_experts // self.size
        assert hidden_states.shape[0] <= most
        rows = hidden_states.new_full((self.size * most, hidden_states.shape[1]), float("nan"))
        ids = topk_ids.new_full(
            (self.size * most, self.params.top_k), self.params.invalid_expert_id
        )
        weights = topk_weights.new_full(ids.shape, float("nan"))
        places: dict[int, Place] = {}
        payload = (self.rank, hidden_states, topk_ids, topk_weights)
        for source, tokens, choices, scales in gather(self._group, payload):
            here = torch.div(choices, local, rounding_mode="floor") == self.rank
            arriving = here.any(1).nonzero().view(-1).tolist()
            for number, token in enumerate(reversed(arriving)):
                row = source * most + number
                foreign = choices[token] if self.keeps_foreign_ids else -1
                rows[row], weights[row] = tokens[token], scales[token]
                ids[row] = torch.where(here[token], choices[token], foreign)
                places[row] = (source, token)
        self._step = Step(places, hidden_states.shape[0])
        return MoEEpDispatchResult(rows, ids, weights, most)

    def combine(self, expert_output: Tensor) -> Tensor:
        step, self._step = self._step, None
        if step is None:
            raise RuntimeError("combine called before dispatch")
        used = expert_output[list(step.places)]
        out = torch.zeros(step.tokens, self.params.hidden_size, dtype=torch.float32)
        for targets, answers in gather(self._group, (list(step.places.values()), used)):
            for (home, token), row in zip(targets, answers, strict=True):
                if home == self.rank:
                    out[token] += row.float()
        return out.to(expert_output.dtype)

    def destroy(self) -> None:
        self._step = None


class OneSided(TwoSided):
    """Choices of other ranks arrive as they are, and ranks may be masked."""

    keeps_foreign_ids = True

    def _check(self, params: MoEEpCommParams) -> None:
        """Any number of experts."""

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: NVLinkOneSidedConfig
    ) -> None:
        super().__init__(bootstrap, params, config)
        self._takes_masks = config.enable_rank_mask
        self._masked: int | None = None

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        if active_rank_mask is not None:
            assert self._takes_masks
            self._go_on_among(int(active_rank_mask[0]))
        return super().dispatch(hidden_states, topk_ids, topk_weights)

    def combine(self, expert_output: Tensor, *, active_rank_mask: Tensor | None = None) -> Tensor:
        assert self._masked == (None if active_rank_mask is None else int(active_rank_mask[0]))
        return super().combine(expert_output)

    def _go_on_among(self, mask: int) -> None:
        if mask != self._masked:
            self._masked = mask
            active = [rank for rank in range(self.size) if mask >> rank & 1]
            self._group = dist.new_group(active, use_local_synchronization=True)


def create_communication(
    bootstrap: BootstrapConfig, params: MoEEpCommParams, backend: Any
) -> TwoSided:
    kinds = {"nvlink_one_sided": OneSided, "nvlink_two_sided": TwoSided}
    return kinds[backend.backend_name](bootstrap, params, backend)
