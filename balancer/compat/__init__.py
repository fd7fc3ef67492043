"""The planner behind signatures that serving engines already call.

One module for each engine, which imports nothing of that engine: `deepseek`, `vllm`,
`vllm_ascend`, `sglang`, `tensorrt_llm`. They are also reachable as `equipoise.compat.*`. The page
docs/compat.md says how to plug each in, and what differs from what it replaces.
"""
