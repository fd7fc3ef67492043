"""The names of workloads, of formats of traces and of step times, for help that must not wait for
numpy."""

from collections.abc import Mapping
from types import MappingProxyType

WORKLOADS: Mapping[str, str] = MappingProxyType(
    {
        "prop": "prompts about 3730, outputs about 1254 tokens, both of a truncated normal",
        "az24": "prompts lognormal with mean 4652, outputs just above 1000 tokens",
        "reason": "short prompts, mean 803, and long heavy-tailed outputs, mean about 3600 tokens",
        "sharegpt": "chat: prompts about 156, outputs about 321 tokens, at most 1024 each",
    }
)
"""What `generate` draws, in one line each."""
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "azure": "Azure LLM inference traces of 2023 and 2024, CSV",
        "mooncake": "Mooncake's traces with hashes of prompt blocks, JSON lines",
        "burstgpt": "BurstGPT, CSV, every release",
        "sharegpt": "ShareGPT's conversations, JSON; no times, and tokens are estimated",
    }
)
"""What `read_trace` reads, in one line each."""
STEP_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "share": "a fixed part, a share of a step at full load, and tokens of the fullest worker",
        "bfio": "that of the BF-IO simulator: hardly any fixed part",
        "blog": "tokens of the fullest worker, and half as much for the mean; no fixed part",
        "dyntralb": "that of a planner of pauses: a fixed part of 133,333 tokens",
    }
)
"""What `published` makes, and `share`, which takes a workload to be made, in one line each."""
