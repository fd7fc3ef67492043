"""Whose rule picks a replica; imports nothing heavy, so that a command line can read it."""

from enum import StrEnum


class RoutingRule(StrEnum):
    """How a token finds one of its expert's replicas."""

    SHARES = "shares"
    """By the shares, as the share mode has them."""
    VLLM = "vllm"
    """As vLLM does: by the hash of the row, evenly."""
    TENSORRT_LLM = "tensorrt_llm"
    """As TensorRT-LLM does: by turns within a block, evenly."""
