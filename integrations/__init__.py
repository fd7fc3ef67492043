"""Thin adapters into serving engines."""
