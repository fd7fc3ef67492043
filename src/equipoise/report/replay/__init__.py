"""Replays recorded routing under the balancers of engines: a model, not a measurement."""
