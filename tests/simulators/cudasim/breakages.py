"""Ways in which the CUDA backend's own code would most easily be wrong, and who is to notice."""

from collections.abc import Sequence
from typing import Any

from devices.conformance.breakage import Breakage, Patch
from torch import Tensor

from equipoise.backends.cuda import byte_ops, host_flags
from equipoise.backends.cuda.byte_ops import CudaByteOps
from equipoise.backends.cuda.host_flags import (
    CLEAR,
    SET,
    CudaAcquireFlag,
    CudaReleaseFlag,
    HostFlag,
    HostFlagPool,
)
from equipoise.hal.stream import Stream


def _word_not_taken(patch: Patch) -> None:
    patch(CudaAcquireFlag, "wait", lambda self, stream: self._flag.enqueue_wait(stream, SET))


def _word_taken_first(patch: Patch) -> None:
    def wait(self: CudaAcquireFlag, stream: Any) -> None:
        self._flag.enqueue_write(stream, CLEAR)
        self._flag.enqueue_wait(stream, SET)

    patch(CudaAcquireFlag, "wait", wait)


def _acquire_that_waits_for_nothing(patch: Patch) -> None:
    patch(CudaAcquireFlag, "wait", lambda self, stream: None)


def _release_by_the_host(patch: Patch) -> None:
    patch(CudaReleaseFlag, "set", lambda self, stream: self._flag.store(SET))


def _one_word_for_all(patch: Patch) -> None:
    healthy = HostFlagPool.take
    shared_words: list[HostFlag] = []

    def take(self: HostFlagPool) -> HostFlag:
        shared_words[:] = shared_words or [healthy(self)]
        return shared_words[0]

    patch(HostFlagPool, "take", take)
    shared_flags: list[CudaAcquireFlag] = []

    def shared_flag(self: Any) -> CudaAcquireFlag:
        shared_flags[:] = shared_flags or [CudaAcquireFlag(self._device)]
        return shared_flags[0]

    patch(host_flags.CudaLockFlags, "acquire_flag", shared_flag)


def _wide_words_only(patch: Patch) -> None:
    healthy = byte_ops._by_width
    patch(byte_ops, "_by_width", lambda pairs: list(healthy(pairs))[:1])


def _checksum_of_the_first_part(patch: Patch) -> None:
    healthy = CudaByteOps.checksum_parts

    def fingerprint(
        self: CudaByteOps, parts: Sequence[Tensor], out: Tensor, stream: Stream
    ) -> None:
        healthy(self, parts[:1], out, stream)

    patch(CudaByteOps, "checksum_parts", fingerprint)


BREAKAGES = (
    Breakage(
        name="word_not_taken",
        broken="an acquire leaves its word given, so that the next replay goes on by itself",
        property="a-captured-lock-hands-over-at-every-replay",
        plant=_word_not_taken,
    ),
    Breakage(
        name="word_taken_first",
        broken="an acquire clears its word before it waits: a signal that came first is lost",
        property="one-signal-lets-one-waiter-go-on",
        plant=_word_taken_first,
    ),
    Breakage(
        name="acquire_that_waits_for_nothing",
        broken="an acquire lets its stream through",
        property="lock-calls-match-the-lock-model",
        plant=_acquire_that_waits_for_nothing,
    ),
    Breakage(
        name="release_by_the_host",
        broken="a release is told when it is issued, not when the stream comes there",
        property="a-captured-lock-hands-over-at-every-replay",
        plant=_release_by_the_host,
    ),
    Breakage(
        name="one_word_for_all",
        broken="all acquires wait for one word",
        property="one-signal-lets-one-waiter-go-on",
        plant=_one_word_for_all,
    ),
    Breakage(
        name="wide_words_only",
        broken="pieces that are not aligned are not copied",
        property="operations-move-every-byte-of-the-segments",
        plant=_wide_words_only,
    ),
    Breakage(
        name="checksum_of_the_first_part",
        broken="the fingerprint of a slot covers its first segment only",
        property="checksums-are-those-of-the-definition",
        plant=_checksum_of_the_first_part,
    ),
)
