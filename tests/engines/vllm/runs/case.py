"""What is run, and what was seen: plain values that cross processes as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_cpu.faults import Fault
from vllm_cpu.missing_features import Hole

ROUTED_FOLDER, RESPONSES_FILE = "routed", "responses.jsonl"
"""In the folder of a case, where the engine returns routed experts: an .npy for each prompt, and
the server's responses."""
Front = Literal["offline", "server", "proxied"]
COMMON: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
    "enable_prefix_caching": False,
    "seed": 0,
}
"""Of every engine. Without prefix caching each round computes all of its tokens again."""


@dataclass(frozen=True)
class Case:
    """One run of vLLM.

    Attributes:
        model: folder of the model.
        prompts: token ids; all of them are asked in each round.
        tokens: to generate for each prompt.
        engine: arguments of the engine, as `vllm.LLM` takes them, beside `COMMON`.
        front: `vllm.LLM` in a process of its own, `vllm serve` and streaming clients, or the same
            with `equipoise route` between them.
        rounds: how often everything is asked.
        holes: of the CPU build, to be filled.
        fault: to be planted in every process.
        asks: methods of the worker, called with `collective_rpc` at the end (offline only).
        plugin: settings of Equipoise's plugin, `additional_config["equipoise"]`; None turns it off.
        pins: data-parallel rank of each prompt, sent as a header (server only); none by default.
        leavers: clients that ask beside the prompts of each round, and go without an answer.
        environment: further variables.
    """

    model: str
    prompts: list[list[int]]
    tokens: int
    engine: Mapping[str, Any] = field(default_factory=dict)
    front: Front = "offline"
    rounds: int = 1
    holes: frozenset[Hole] = frozenset()
    fault: Fault | None = None
    asks: tuple[str, ...] = ()
    plugin: Mapping[str, Any] | None = None
    pins: tuple[int | None, ...] = ()
    leavers: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the engine."""
        engine_arguments = {**COMMON, **self.engine, "model": self.model}
        if self.plugin is not None:
            additional = {**engine_arguments.get("additional_config", {}), "equipoise": self.plugin}
            engine_arguments["additional_config"] = additional
        return engine_arguments

    @property
    def text(self) -> str:
        """The case as JSON."""
        return json.dumps(asdict(self) | {"holes": sorted(self.holes)})

    @staticmethod
    def parsed(text: str) -> "Case":
        """The case of a `text`. Raises `ValueError` or `TypeError` for another."""
        fields = json.loads(text)
        fields["holes"] = frozenset(Hole(name) for name in fields["holes"])
        fields["fault"] = None if fields["fault"] is None else Fault(fields["fault"])
        fields["asks"], fields["pins"] = tuple(fields["asks"]), tuple(fields["pins"])
        return Case(**fields)


@dataclass(frozen=True)
class Answers:
    """The results that a driver writes.

    Attributes:
        rounds: by round and prompt, the tokens.
        asked: by method, what each worker answered.
        metrics: the text of `/metrics` after the last round (server only).
        proxy: the same of the proxy.
    """

    rounds: list[list[list[int]]]
    asked: dict[str, list[Any]] = field(default_factory=dict)
    metrics: str = ""
    proxy: str = ""

    def write(self, path: Path) -> None:
        """Write the answers as JSON, atomically."""
        half = path.with_suffix(".half")
        half.write_text(json.dumps(asdict(self)), encoding="utf-8")
        half.rename(path)
