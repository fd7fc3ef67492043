"""What every run of vLLM has to say, token for token."""

import json
from dataclasses import dataclass
from pathlib import Path

NAME = "reference.json"


@dataclass(frozen=True)
class Reference:
    """One model: where it is, and for each prompt its ids and what follows.

    Attributes:
        folder: of configuration, weights and tokenizer.
        prompts: token ids by prompt.
        tokens: greedy tokens by prompt, `SAMPLED_TOKENS` each.
        margin: least distance of the best logit from the second best in all of that. Another
            order of float32 sums changes logits by about 1e-5; a margin far above that makes
            equality of tokens a statement about the program, not about luck.
    """

    folder: str
    prompts: list[list[int]]
    tokens: list[list[int]]
    margin: float


def read_references(folder: Path) -> dict[str, Reference]:
    """Read the references that `python -m engines.vllm.runs.reference` wrote."""
    references = json.loads((folder / NAME).read_text(encoding="utf-8"))
    return {name: Reference(**one) for name, one in references.items()}
