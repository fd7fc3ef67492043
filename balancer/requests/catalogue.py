"""Names of workloads, trace formats and step times, for help texts that must not wait for numpy."""

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
"""Workloads of `generate`, described in a line each."""
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "azure": "Azure LLM inference traces of 2023 and 2024, CSV",
        "mooncake": "Mooncake's traces with hashes of prompt blocks, JSON lines",
        "burstgpt": "BurstGPT, CSV, every release",
        "sharegpt": "ShareGPT's conversations, JSON; no times, and tokens are estimated",
    }
)
"""Trace formats of `read_trace`, described in a line each."""
STEP_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "share": "a fixed part, a share of a step at full load, and tokens of the fullest worker",
        "bfio": "that of the BF-IO simulator: hardly any fixed part",
        "blog": "tokens of the fullest worker, and half as much for the mean; no fixed part",
        "dyntralb": "that of a planner of pauses: a fixed part of 133,333 tokens",
    }
)
"""Step times of `published_step_time`, and `share` (`with_fixed_share`), in a line each."""
