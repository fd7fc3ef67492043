"""Records the experts of every token of a rank's requests, as SGLang's server would return them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from equipoise.balancer.formats import (
    IterationRange,
    RoutedTokens,
    RoutingTrace,
    TraceUnit,
    read_trace,
    write_trace,
)
from equipoise.balancer.formats.format_names import SGLANG_ROUTED
from equipoise.balancer.formats.routing_trace import Ids
from equipoise.demo.model import ModelConfig
from equipoise.hal.errors import FormatError

RANK_FILE = "rank{}.jsonl"


class RoutingRecorder:
    """Collects the ids of one pass, layer by layer and step by step; `close` writes a file.

    Args:
        folder: shared by the ranks; each writes a file, also if it has no request.
        rank: this rank.
        steps: the steps to record.
        config: of the model.
    """

    def __init__(self, folder: Path, rank: int, steps: IterationRange, config: ModelConfig) -> None:
        self._path = folder / RANK_FILE.format(rank)
        self._steps = steps
        self._config = config
        self._layers: dict[int, Ids] = {}
        self._ids: dict[int, list[Ids]] = {}
        self._prompt_tokens: dict[int, int] = {}

    def add_layer(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Takes the ids of a layer, (rows, top_k) of all requests of the step."""
        self._layers[layer] = expert_ids.cpu().numpy().astype(np.int32)

    def end_step(self, step: int, requests: Sequence[tuple[int, int, int]]) -> None:
        """Divides the rows of a step among its requests.

        Args:
            step: its number.
            requests: number, rows and rows of the prompt, in the order of the rows.
        """
        ids = np.stack([self._layers[layer] for layer in range(self._config.layers)], axis=1)
        self._layers.clear()
        if step not in self._steps:
            return
        ends = np.cumsum([rows for _, rows, _ in requests])
        for (number, _, prompt), part in zip(requests, np.split(ids, ends)[:-1], strict=True):
            self._ids.setdefault(number, []).append(part)
            self._prompt_tokens[number] = self._prompt_tokens.get(number, 0) + prompt

    def close(self) -> None:
        """Writes the file. Raises `FormatError` if the system does not take it."""
        parts = [
            RoutedTokens(
                np.concatenate(self._ids[number]),
                request=str(number),
                prompt_tokens=self._prompt_tokens[number],
            )
            for number in sorted(self._ids)
        ]
        trace = trace_of_parts(parts, self._config.layers, self._config.experts, self._config.top_k)
        write_trace(self._path, trace, SGLANG_ROUTED)


def trace_of_parts(
    parts: Sequence[RoutedTokens], layers: int, experts: int, top_k: int
) -> RoutingTrace:
    """Returns requests in memory as a trace."""
    return RoutingTrace(
        TraceUnit.REQUEST,
        tuple(range(layers)),
        experts,
        True,
        top_k,
        sum(len(part.ids) for part in parts),
        len(parts),
        "the shipped model",
        lambda: iter(parts),
    )


def read_ranks(folder: Path, ranks: int, experts: int) -> RoutingTrace:
    """Returns what all ranks recorded, by number of the request. Raises `FormatError`."""
    parts: list[RoutedTokens] = []
    for rank in range(ranks):
        path = folder / RANK_FILE.format(rank)
        if path.exists() and not path.stat().st_size:
            continue  # it had no request in these steps
        trace = read_trace(path, experts=experts)
        assert isinstance(trace, RoutingTrace)
        parts += trace.parts()
    if not parts:
        raise FormatError(str(folder), "no rank has recorded a token")
    parts.sort(key=lambda part: int(part.request or 0))
    layers, top_k = parts[0].ids.shape[1:]
    return trace_of_parts(parts, layers, experts, top_k)
