"""Tiny language models of families that vLLM serves, made here: no weights are kept anywhere.

Weights are drawn from a fixed seed with a wide spread, so that greedy tokens vary and a wrong
expert shows at once. Sizes are multiples of 32, which the expert kernels of vLLM's CPU build need.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SEED = 2
SPREAD = 0.2
"""Standard deviation of the weights; the usual 0.02 gives one token for ever."""
VOCABULARY = 512
END = "<|end|>"
CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def make_models(folder: Path) -> dict[str, Path]:
    """Write every model of `MODELS_PATH` with its tokenizer; the folder of each by name."""
    tokenizer = _tokenizer()
    folders = {}
    for name, (family, config) in MODELS.items():
        torch.manual_seed(SEED)
        model = family(config).to(torch.float32)
        _correct(model)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        folders[name] = folder / name
    return folders


def _correct(model: PreTrainedModel) -> None:
    """Corrections of scores start at zero, where nobody would miss them."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=SPREAD)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte; and names for all else that a model may say, which no text has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = [END, *(f"<|{number}|>" for number in range(len(alphabet) + 1, VOCABULARY))]
    vocabulary = {sign: number for number, sign in enumerate([*alphabet, *others])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT)


def _routed_config(experts: int, chosen: int) -> Qwen3MoeConfig:
    counts = {"num_experts": experts, "num_experts_per_tok": chosen}
    return Qwen3MoeConfig(**COMMON, **EXPERTS, **counts, head_dim=32)


def _shared_expert_config() -> Qwen2MoeConfig:
    """Routed experts beside one that every token visits."""
    counts = {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
    return Qwen2MoeConfig(**COMMON, **EXPERTS, **counts)


def _grouped_config() -> Glm4MoeConfig:
    """As DeepSeek's: a dense layer, then groups of experts, their scores corrected, one shared."""
    counts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    layers = {"first_k_dense_replace": 1, "num_mtp_layers": 0, "head_dim": 32}
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128, "norm_topk_prob": True}
    return Glm4MoeConfig(**COMMON, **counts, **groups, **layers, **sizes, use_qk_norm=True)


def _dense() -> Qwen3Config:
    return Qwen3Config(**COMMON, intermediate_size=128, head_dim=32)


MODELS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "qwen3-moe": (Qwen3MoeForCausalLM, _routed_config(8, 2)),
    "qwen3-moe-16": (Qwen3MoeForCausalLM, _routed_config(16, 4)),
    "qwen2-moe": (Qwen2MoeForCausalLM, _shared_expert_config()),
    "glm4-moe": (Glm4MoeForCausalLM, _grouped_config()),
    "qwen3": (Qwen3ForCausalLM, _dense()),
}
"""Name to class and sizes."""
