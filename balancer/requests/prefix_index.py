"""Which worker has been sent which prompts: a guess at what their prefix caches have.

A radix tree over blocks of prompts, kept as one table: a block's hash covers the prompt up to its
end, so whoever has a block has had those before it. What engines evict is not known here.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_BYTES, BLOCK_TOKENS = 512, 128
"""Of a block: bytes of a prompt's text, or tokens where it is a list of them."""
MAX_BLOCKS = 4096
"""Blocks of one prompt: 2 MiB of text. What comes after them counts as not cached."""
MAX_ENTRIES = 1 << 16
"""Blocks that are remembered: 8 million tokens, in about 10 MB."""
TOKEN_CODE, TOKEN_BYTES = "q", 8


def text_blocks(text: bytes, model: str = "") -> tuple[int, ...]:
    """Hashes of the whole blocks of a prompt's text, each of all up to its end.

    `model` is what else a cache tells apart: the name of the model, and of an adapter.
    """
    return _blocks(text, BLOCK_BYTES, model)


def token_blocks(tokens: Sequence[int], model: str = "") -> tuple[int, ...]:
    """The same of a prompt of token ids. Raises OverflowError for one that 64 bits do not hold."""
    first = tokens[: BLOCK_TOKENS * MAX_BLOCKS]
    return _blocks(array(TOKEN_CODE, first).tobytes(), BLOCK_TOKENS * TOKEN_BYTES, model)


def _blocks(content: bytes, size: int, model: str) -> tuple[int, ...]:
    # Not Python's `hash`: it differs between processes, and large bodies are read in another one.
    prefix, hashes = blake2b(model.encode("utf-8", "surrogatepass"), digest_size=8), []
    for end in range(size, min(len(content), size * MAX_BLOCKS) + 1, size):
        prefix.update(content[end - size : end])
        hashes.append(int.from_bytes(prefix.copy().digest(), "little"))
    return tuple(hashes)


class PrefixIndex:
    """Blocks by worker, those used last; not thread-safe.

    Args:
        most_entries: blocks that are remembered, of all workers together.
    """

    def __init__(self, most_entries: int = MAX_ENTRIES) -> None:
        self._most_entries = most_entries
        self._workers: OrderedDict[int, int] = OrderedDict()  # a bit for each worker

    def __len__(self) -> int:
        return len(self._workers)

    def matches(self, blocks: Sequence[int], workers: int) -> list[int]:
        """Leading blocks that were sent to each of so many workers."""
        matched = [0] * workers
        present = (1 << workers) - 1
        for number, block in enumerate(blocks):
            present_here = self._workers.get(block, 0) & present
            _set_bits(matched, present & ~present_here, number)
            present = present_here
            if not present:
                return matched
        _set_bits(matched, present, len(blocks))
        return matched

    def insert(self, blocks: Sequence[int], worker: int) -> None:
        """A prompt was sent to a worker."""
        # The first block last, so that it stays longest: without it the others are of no use.
        for block in reversed(blocks):
            self._workers[block] = self._workers.pop(block, 0) | 1 << worker
        while len(self._workers) > self._most_entries:
            self._workers.popitem(last=False)

    def forget(self, worker: int) -> None:
        """A worker has nothing any more: it was lost, or is another one."""
        for block, workers in list(self._workers.items()):
            rest = workers & ~(1 << worker)
            if rest:
                self._workers[block] = rest
            else:
                del self._workers[block]


def _set_bits(values: list[int], bits: int, value: int) -> None:
    while bits:
        low = bits & -bits
        values[low.bit_length() - 1] = value
        bits ^= low
