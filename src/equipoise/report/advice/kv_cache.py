"""The KV cache beside expert weights: what a rank's memory holds of one, the other cannot have."""

from dataclasses import dataclass

from equipoise.hal.errors import FormatError
from equipoise.report.text import format_size


@dataclass(frozen=True)
class KvCache:
    """The memory of a rank that expert weights and KV cache share.

    Attributes:
        bytes_per_token: KV cache of one token on one rank, all layers. Where attention is sharded
            over ranks (tensor parallelism), the rank's part: 2 * layers * KV heads of the rank *
            size of a head * bytes of a number. Where each rank has its own requests (data-parallel
            attention), all heads.
        memory_bytes: of a rank, for expert weights and KV cache together: what the engine prints
            as KV cache memory at its start, plus the expert weights that the rank holds then.
    """

    bytes_per_token: int
    memory_bytes: int

    def tokens(self, expert_weight_bytes: int) -> int:
        """Tokens of KV cache beside so many bytes of expert weights; 0 where they take all."""
        return max(0, self.memory_bytes - expert_weight_bytes) // self.bytes_per_token

    def check_room(self, expert_weight_bytes: int, option: str = "memory") -> None:
        """Raises `FormatError` that names `option` where the weights leave no KV cache."""
        if not self.tokens(expert_weight_bytes):
            raise FormatError(
                option,
                f"{format_size(self.memory_bytes)} of a rank leave no KV cache beside its expert "
                f"weights, {format_size(expert_weight_bytes)}",
            )
