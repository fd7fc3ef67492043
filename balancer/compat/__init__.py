"""The planner with the signatures that serving engines already call.

One module per engine, none of which imports the engine: `deepseek`, `vllm`, `vllm_ascend`,
`sglang`, `tensorrt_llm`. They can also be imported as `equipoise.compat.*`. docs/compat.md says how
to install each one and how it differs from what it replaces.
"""
