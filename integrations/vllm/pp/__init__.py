"""Tensor dictionaries between pipeline stages, over our channel."""
