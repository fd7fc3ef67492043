"""The training loop."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from training.corpus import Corpus
from training.network import Network

BATCH = 12
PEAK_RATE = 4e-3
WARM_UP = 30
BALANCE = 1e-4


def train(network: Network, corpora: tuple[Corpus, ...], steps: int, seed: int) -> None:
    """AdamW in place: flat after the warm-up, then linear decay over the second half.

    A batch holds equally many windows of each kind. Prints the loss, in bits per byte, 20 times.
    """
    texts = [torch.frombuffer(bytearray(c.trained), dtype=torch.uint8).long() for c in corpora]
    draw = torch.Generator().manual_seed(seed)
    parameters = list(network.parameters())
    optimiser = torch.optim.AdamW(
        parameters, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.05, fused=True
    )
    begun = time.monotonic()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate(step, steps)
        loss, balance = losses(network, windows(texts, network.config.context, draw))
        optimiser.zero_grad()
        torch.autograd.backward(loss + BALANCE * balance)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if (step + 1) % max(1, steps // 20) == 0:
            seconds = time.monotonic() - begun
            bits = loss.item() / 0.6931
            print(
                f"step {step + 1} of {steps}, {bits:.3f} bits per byte, {seconds:.0f} s", flush=True
            )


def rate(step: int, steps: int) -> float:
    """The learning rate of a step."""
    decay = 2 * (steps - step) / steps
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP, decay)


def windows(texts: list[Tensor], context: int, draw: torch.Generator) -> Tensor:
    """(BATCH, context + 1) int64: windows at random offsets, the kinds in turn."""
    samples = []
    for i in range(BATCH):
        text = texts[i % len(texts)]
        start = int(torch.randint(len(text) - context, (1,), generator=draw))
        samples.append(text[start : start + context + 1])
    return torch.stack(samples)


def losses(network: Network, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats per byte, and the balance loss."""
    logits, balance = network(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), balance
