"""Names of workloads, traces, step times and prefill rules: for help texts, without numpy."""

from collections.abc import Mapping
from enum import Enum, unique
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


@unique
class PrefillRule(Enum):
    """An engine's rule of when its data-parallel workers compute prompts; the value is its name.

    docs/design/request-balance.md says what is left out of them.
    """

    PREFILL_DELAYER = "sglang"
    """SGLang, `--enable-prefill-delayer`: none is admitted while only some workers have one."""
    SCHEDULE_INTERVAL = "vllm"
    """vLLM, `prefill_schedule_interval`: prompts are computed in every n-th step."""
    ATTENTION_DP = "trtllm"
    """TensorRT-LLM, `attention_dp_config`: prompts wait until every worker has one."""


DEFAULT_LIMITS = {
    PrefillRule.PREFILL_DELAYER: 30,
    PrefillRule.SCHEDULE_INTERVAL: 8,
    PrefillRule.ATTENTION_DP: 50,
}
"""Steps: `prefill_delayer_max_delay_passes` and `timeout_iters` as the engines have them; vLLM's
interval is 1 unless set, which is no alignment."""
