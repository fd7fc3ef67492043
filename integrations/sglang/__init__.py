"""Equipoise inside SGLang; see docs/sglang.md."""
