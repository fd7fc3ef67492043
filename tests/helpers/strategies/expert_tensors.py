"""Expert weights of every form that a model may have them in, for hypothesis."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancer.experts.weights.expert_weights import SlotTensors

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
)


@dataclass(frozen=True)
class Part:
    """A named tensor of an expert.

    `form`: `stacked`; `each`, a tensor a slot; `padded`, stacked with a gap behind every slot;
    `turned`, stacked, with each slot's memory column by column.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: str

    def make(self, slots: int) -> SlotTensors:
        """Memory for it, of ones' bytes."""
        if self.form == "each":
            return [self._empty(*self.shape) for _ in range(slots)]
        if self.form == "turned":
            return self._empty(slots, *reversed(self.shape)).permute(
                0, *range(len(self.shape), 0, -1)
            )
        if self.form == "padded":
            flat = self._empty(slots, 3, *self.shape)
            return flat[:, 1]
        return self._empty(slots, *self.shape)

    def _empty(self, *shape: int) -> Tensor:
        nbytes = torch.Size(shape).numel() * self.dtype.itemsize
        return torch.ones(nbytes, dtype=torch.uint8).view(self.dtype).view(shape)


PARTS = st.builds(
    Part,
    name=st.sampled_from(["w13", "w2", "scale", "zero.point"]),
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(["stacked", "each", "padded", "turned"]),
)
KINDS = st.lists(PARTS, min_size=1, max_size=4, unique_by=lambda part: part.name)
"""What the experts of a layer consist of."""


def tensors_of(slot_tensors: SlotTensors) -> list[Tensor]:
    """Slot by slot."""
    return list(slot_tensors)


def raw(tensor: Tensor) -> bytes:
    """A tensor's elements as bytes, in the order in which the model sees them."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
