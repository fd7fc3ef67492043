"""Greedy tokens as transformers generates them: what every run of vLLM is compared with.

    python -m engines.vllm.runs.reference FOLDER

makes the models in the folder and writes `reference.json` beside them. One prompt at a time,
without a cache and without batching, in float32: nothing of what is tested takes part.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from engines.vllm.runs.models import make_models
from engines.vllm.runs.prompts import PROMPTS, TOKENS
from engines.vllm.runs.reference_tokens import NAME, Reference
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def compute(folder: Path) -> dict[str, Reference]:
    """Make the models under `folder`, and generate with each."""
    return {name: _of_model(where) for name, where in make_models(folder).items()}


def _of_model(folder: Path) -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    continuations = [_continue(model, prompt) for prompt in prompts]
    tokens = [tokens for tokens, _ in continuations]
    return Reference(str(folder), prompts, tokens, min(margin for _, margin in continuations))


@torch.no_grad()
def _continue(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], float]:
    ids, margin = list(prompt), float("inf")
    for _ in range(TOKENS):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = torch.topk(logits, 2).values
        margin = min(margin, float(best[0] - best[1]))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], margin


def main() -> int:
    """The program."""
    folder = Path(sys.argv[1])
    references = {name: asdict(one) for name, one in compute(folder).items()}
    (folder / NAME).write_text(json.dumps(references), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
