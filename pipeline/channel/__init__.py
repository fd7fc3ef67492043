"""Messages between two ranks over one edge: sent from, and received into, rings of buffers."""
