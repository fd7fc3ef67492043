"""Channels between two ranks: tensors sent from, and received into, rings of buffers."""
