"""Lets the CPU build of vLLM run pipelines, expert parallelism and EPLB; for tests only.

A platform plugin of vLLM and a worker. Each hole of the CPU build is one member of `holes.Hole`,
filled by one function that says what it fills; the environment variable `EQUIPOISE_VLLM_CPU` names
those to fill. Where it is unset nothing of vLLM is touched.

Importing this imports neither vLLM nor torch.
"""
