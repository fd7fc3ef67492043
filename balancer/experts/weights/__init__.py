"""Which tensors are the experts', and where they lie."""
