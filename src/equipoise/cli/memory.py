"""Device memory that balancing takes in the demo, worked out before anything is allocated."""

from equipoise.demo.model.config import ModelConfig
from equipoise.demo.settings import RunSettings

WEIGHT_BYTES = 4
"""The model computes in float32."""

TABLE_BYTES = 4
GENERATIONS = 2


def demo_memory(run: RunSettings) -> dict[str, int]:
    """Bytes per rank by purpose, in the order they are worth reading.

    Staging holds one buffer per slot, so that one epoch may replace every slot of a rank; routing
    tables exist twice, for the installed and for the next generation. Buffers of the communicator
    are not counted: they are host memory that it manages itself.
    """
    model = ModelConfig()
    expert = 3 * model.hidden * model.expert_width * WEIGHT_BYTES
    slots = run.slots // run.ranks * model.layers
    home = model.experts // run.ranks * model.layers
    tables = model.layers * (model.experts + 1 + 2 * run.slots) * TABLE_BYTES
    return {
        "experts held without balancing": home * expert,
        "redundant slots": (slots - home) * expert,
        "staging": slots * expert,
        "routing tables": GENERATIONS * tables,
    }
