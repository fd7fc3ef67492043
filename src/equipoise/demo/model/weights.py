"""The weights of the model: their names, shapes, and where they come from."""

import json
import struct
from dataclasses import dataclass, fields, replace
from importlib.resources import files

import torch
from safetensors.torch import load
from torch import Tensor

from equipoise.demo.model.config import ModelConfig

SHIPPED = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """Every parameter, float32, dense ones stored [in, out].

    Leading dimension = layer where there is one. `embed` is (3, 256, hidden): of the byte itself,
    of the one before, of the one before that. `gate_up` is (layers, experts, hidden,
    2 * expert_width), gate first; `down` is (layers, experts, expert_width, hidden): an expert is
    one contiguous block in each, so that slots can be copied out of them.
    """

    config: ModelConfig
    embed: Tensor
    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    expert_norm: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    final_norm: Tensor
    head: Tensor

    def __post_init__(self) -> None:
        for name, shape in tensor_shapes(self.config).items():
            tensor: Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                actual = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"weight {name} is {actual}, expected {shape} float32")

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.embed.device

    def of_layers(self, layers: range) -> "ModelWeights":
        """A model of some of the layers, numbered from 0; embedding and head are the same."""
        config = replace(self.config, layers=len(layers))
        parts = {
            name: getattr(self, name)[layers.start : layers.stop]
            for name in ("attention_norm", "qkv", "out", "expert_norm", "router", "gate_up", "down")
        }
        return replace(self, config=config, **parts)

    def to(self, device: torch.device) -> "ModelWeights":
        """The same weights in the memory of a device; themselves where they are there already."""
        names = [field.name for field in fields(self) if field.name != "config"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the order of the file."""
    layers, hidden, experts = config.layers, config.hidden, config.experts
    return {
        "embed": (3, config.vocabulary, hidden),
        "attention_norm": (layers, hidden),
        "qkv": (layers, hidden, 3 * hidden),
        "out": (layers, hidden, hidden),
        "expert_norm": (layers, hidden),
        "router": (layers, hidden, experts),
        "gate_up": (layers, experts, hidden, 2 * config.expert_width),
        "down": (layers, experts, config.expert_width, hidden),
        "final_norm": (hidden,),
        "head": (hidden, config.vocabulary),
    }


def load_weights() -> ModelWeights:
    """The trained weights that ship with the package: bfloat16 in the file, float32 in memory."""
    blob = shipped_bytes()
    return weights_from(load(blob), config_from(metadata(blob)))


def shipped_bytes() -> bytes:
    """The safetensors file of the package."""
    return files("equipoise.demo").joinpath("weights", SHIPPED).read_bytes()


def metadata(blob: bytes) -> dict[str, str]:
    """The header metadata of a safetensors file: licence, sources, sizes, figures.

    Source: the safetensors format (8 bytes little-endian header length, then JSON).
    """
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    return dict(header["__metadata__"])


def config_from(notes: dict[str, str]) -> ModelConfig:
    """The sizes recorded in the file's metadata."""
    return ModelConfig(**json.loads(notes["config"]))


def weights_from(tensors: dict[str, Tensor], config: ModelConfig) -> ModelWeights:
    """Named tensors of any float type -> float32 weights; ValueError where a name is missing."""
    names = [field.name for field in fields(ModelWeights) if field.name != "config"]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"weights lack {', '.join(missing)}")
    return ModelWeights(config=config, **{n: tensors[n].float().contiguous() for n in names})


def random_weights(config: ModelConfig, seed: int) -> ModelWeights:
    """Untrained weights of the scale training starts from; a pure function of its arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm"):
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * initial_scale(name, config)

    return weights_from({n: draw(n, s) for n, s in tensor_shapes(config).items()}, config)


def initial_scale(name: str, config: ModelConfig) -> float:
    """Standard deviation of a freshly drawn weight.

    Products keep the scale of their input (1 / sqrt(in)); those that write into the residual
    stream are divided by the number of such writes, after GPT-2 (Radford et al. 2019).
    """
    residual = float((2 * config.layers) ** -0.5)
    scales = {
        "embed": 0.3,
        "out": config.hidden**-0.5 * residual,
        "down": config.expert_width**-0.5 * residual,
        "router": 0.5 * config.hidden**-0.5,
        "head": 0.5 * config.hidden**-0.5,
    }
    return float(scales.get(name, config.hidden**-0.5))
