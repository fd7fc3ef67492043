"""The oracle: one process that serves the same requests with no exchange and no balancer."""

import time

from equipoise.demo.model import Decoder, KVCache, LocalExperts, ModelWeights
from equipoise.demo.progress import Progress
from equipoise.demo.requests import Desk, capacity
from equipoise.demo.traffic import Traffic

NAME = "reference"


def serve_alone(weights: ModelWeights, traffic: Traffic, progress: Progress) -> Desk:
    """Serve everything where the weights are; the digests are what every variant must equal."""
    desk = Desk(traffic, rank=0, ranks=1)
    decoder, experts = Decoder(weights), LocalExperts(weights)
    cache = KVCache(weights.config, capacity(traffic, ranks=1), weights.device)
    progress.variant(NAME, traffic.steps)
    began = time.perf_counter()
    for step in range(traffic.steps):
        batch = desk.batch(step)
        desk.take(batch, decoder.forward(batch, cache, experts).cpu())
        progress.step(step + 1, float("nan"), f"{time.perf_counter() - began:.0f} s")
    desk.close()
    return desk
