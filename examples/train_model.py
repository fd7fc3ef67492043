"""Make the shipped model again, or another: build the corpus, train, measure, save.

    python examples/train_model.py --sources DIR --weights model.safetensors

`DIR` holds the Debian packages that `examples/training/sources.py` names, unpacked. With
`--fixtures DIR` the held-out texts are written as well, with `--windows FILE` the hashes of the
training text (`examples/training/windows.py`).
About six minutes on two cores for 1,200 steps.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from training.corpus import Corpus, build
from training.figures import Figures, correlation, measure
from training.loop import train
from training.network import Network, rounded, save_weights
from training.windows import pack

from equipoise.demo.model import ModelConfig, ModelWeights

RANKS = 4


def main() -> None:
    """Parse the command line and do what it asks."""
    options = _parser().parse_args()
    try:
        corpora = build(options.sources)
    except ValueError as error:
        raise SystemExit(f"train_model: {error}") from None
    for corpus in corpora:
        print(corpus.digests())
    if options.fixtures:
        write_fixtures(corpora, options.fixtures)
    if options.windows:
        options.windows.write_bytes(pack([corpus.trained for corpus in corpora]))
    if options.weights:
        torch.manual_seed(options.seed)
        network = Network(ModelConfig(), options.seed)
        train(network, corpora, options.steps, options.seed)
        save(rounded(network), corpora, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the shipped MoE language model.")
    parser.add_argument("--sources", type=Path, required=True, help="unpacked Debian packages")
    parser.add_argument("--fixtures", type=Path, help="write the held-out texts here")
    parser.add_argument("--windows", type=Path, help="write the hashes of the training text here")
    parser.add_argument("--weights", type=Path, help="train, and write the weights here")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def write_fixtures(corpora: tuple[Corpus, ...], folder: Path) -> None:
    """`<kind>.txt` of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    for corpus in corpora:
        (folder / f"{corpus.name}.txt").write_bytes(corpus.held_out)


def save(weights: ModelWeights, corpora: tuple[Corpus, ...], options: argparse.Namespace) -> None:
    """Measure with the inference code on one thread, print, and write bfloat16 safetensors."""
    torch.set_num_threads(1)
    with torch.no_grad():
        figures = {corpus.name: measure(weights, corpus.held_out) for corpus in corpora}
    notes = {
        "license": "Apache-2.0",
        "sources": "text/ORIGINS.md",
        "config": json.dumps(asdict(weights.config)),
        "bits_per_byte": json.dumps({n: round(f.bits_per_byte, 4) for n, f in figures.items()}),
        "training": f"examples/train_model.py --steps {options.steps} --seed {options.seed}",
    }
    notes |= {f"corpus {corpus.name}": corpus.digests() for corpus in corpora}
    save_weights(weights, options.weights, notes)
    report(figures)


def report(figures: dict[str, Figures]) -> None:
    """Print what `docs/design/model.md` quotes."""
    for name, figure in figures.items():
        others = ", ".join(f"{n} {correlation(figure, f):.2f}" for n, f in figures.items())
        print(
            f"{name}: {figure.bits_per_byte:.3f} bits per byte, skew {figure.skew(RANKS):.3f} "
            f"on {RANKS} ranks, correlation of loads: {others}"
        )


if __name__ == "__main__":
    main()
