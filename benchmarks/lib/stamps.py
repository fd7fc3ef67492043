"""A few words that a stage writes into what it sends, so that nobody is fast by being wrong.

The words are a function of step, stage, tensor and place. They are spread over the whole tensor: a
buffer that came late, that is of another step, or that was written again while it still travelled
has a wrong one.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SAMPLES, STAGES, TENSORS = 32, 8, 8
"""Words of a tensor at most; what is told apart."""
PRIME = 65521
Words = npt.NDArray[np.int16]
Places = npt.NDArray[np.int64]


def stamp(tensor: Tensor, step: int, stage: int, which: int) -> None:
    """Write the words into a contiguous tensor."""
    words = _words(tensor)
    places, firsts = _places(words.size)
    words[places] = _stamps(firsts, step, stage, which)


def wrong(tensor: Tensor, step: int, stage: int, which: int) -> int:
    """How many words are not those."""
    words = _words(tensor)
    places, firsts = _places(words.size)
    return int(np.count_nonzero(words[places] != _stamps(firsts, step, stage, which)))


def _words(tensor: Tensor) -> Words:
    words: Words = tensor.view(-1).view(torch.int16).numpy()
    return words


@lru_cache
def _places(size: int) -> tuple[Places, Places]:
    """Where words are, and what step 0 has there; made once a size, since steps are short."""
    places = np.linspace(0, size - 1, SAMPLES, dtype=np.int64)
    return places, places * 31 % PRIME


def _stamps(firsts: Places, step: int, stage: int, which: int) -> Words:
    base = ((step * STAGES + stage) * TENSORS + which) * 40503  # all differ for a thousand steps
    return ((base % PRIME + firsts) % PRIME).astype(np.uint16).view(np.int16)
