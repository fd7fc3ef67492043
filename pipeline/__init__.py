"""Transport of activations between pipeline stages and between expert-parallel ranks."""
