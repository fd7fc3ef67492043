"""An accelerator backend that runs everything at the call."""

from equipoise_inline.accelerator import InlineBackend

BACKEND = InlineBackend()

__all__ = ["BACKEND"]
