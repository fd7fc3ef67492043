"""Equipoise inside vLLM; see docs/vllm.md. Imports neither vLLM nor torch by itself."""
