"""Which rank does what: stages of a pipeline, and the ranks within a stage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Ranks in stages, each of which holds some of the layers, and within a stage in groups that
    serve the same requests.

    Rank = (stage * `data` + place) * `tensor` + slice, where `data` groups of `tensor` ranks are in
    a stage: the ranks of a group hold the same tokens, compute attention alike, send a slice each
    of it to experts, and hand over a slice each.

    Attributes:
        ranks: of the run.
        stages: of the pipeline, each of as many ranks.
        tensor_parallel_size: ranks that serve the same requests.
    """

    ranks: int
    stages: int = 1
    tensor_parallel_size: int = 1

    @property
    def data_parallel_only(self) -> bool:
        """Whether there is one stage, of ranks that all serve different requests."""
        return self.stages == self.tensor_parallel_size == 1

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a stage, which share its experts."""
        return self.ranks // self.stages

    @property
    def data_parallel_size(self) -> int:
        """Groups of a stage that serve different requests."""
        return self.ranks_per_stage // self.tensor_parallel_size

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return rank // self.ranks_per_stage

    def group(self, rank: int) -> int:
        """Which requests a rank serves."""
        return rank % self.ranks_per_stage // self.tensor_parallel_size

    def slice(self, rank: int) -> int:
        """Which slice of them is its own."""
        return rank % self.tensor_parallel_size

    def stage_ranks(self, rank: int) -> tuple[int, ...]:
        """All ranks of its stage."""
        first = self.stage(rank) * self.ranks_per_stage
        return tuple(range(first, first + self.ranks_per_stage))

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks of all stages that serve what it serves, the same slice of it."""
        return tuple(range(rank % self.ranks_per_stage, self.ranks, self.ranks_per_stage))

    def slices(self, rank: int) -> tuple[int, ...]:
        """The ranks of its stage that serve the same requests."""
        first = rank - self.slice(rank)
        return tuple(range(first, first + self.tensor_parallel_size))

    def layers(self, rank: int, layers: int) -> range:
        """The layers of its stage, of so many: as even as can be, more in later stages."""
        stage = self.stage(rank)
        return range(layers * stage // self.stages, layers * (stage + 1) // self.stages)
