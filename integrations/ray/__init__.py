"""Equipoise's policies as a request router of Ray Serve; see docs/ray.md."""
