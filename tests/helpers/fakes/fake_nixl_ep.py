"""The module `nixl_ep`, with the stand-in for its buffer."""

from helpers.fakes.fake_expert_buffers import NixlBuffer as Buffer
from helpers.fakes.fake_expert_buffers import topk_idx_t

__all__ = ["Buffer", "topk_idx_t"]
