"""Registers commux' UCX backend with torch.distributed: `c10d:commux_groups:ucx`."""

import commux

commux.register()
