"""Weights move between ranks, and from the memory of the host."""
