"""A stand-in for FlashInfer on the host: `comm` and `moe_ep`, as far as the adapter uses them."""
