"""Hands activations between stages and expert-parallel ranks."""
