"""The model families of docs/models.md: configurations of transformers as published, with few layers, or tiny."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from codetta.audit.complex_llama import ComplexLlama, Sizes
from codetta.audit.models import Subject, perturb_gains, random_model, token_batch, transformers

LAYERS = 2
TOKENS = (2, 8192)
IMAGES = 64
TINY_TOKENS = (2, 12)
TINY_IMAGES = 2

Build = Callable[[Mapping[str, Any], torch.dtype], nn.Module]


@dataclass(frozen=True, slots=True)
class Family:
    """A published configuration, what of it is smaller in a tiny one, and how a model is built from either."""

    title: str
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]
    build: Build
    images: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self, *, tiny: bool) -> dict[str, Any]:
        """Of the published sizes or of the tiny ones."""
        return {**self.sizes, **(self.tiny if tiny else {})}


def _causal(model_type: str, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    made = transformers().AutoConfig.for_model(model_type, **{**TEXT, **config})
    made.use_cache = False
    return random_model(made, dtype, seed=0, device=torch.get_default_device().type)


def _encoder(auto: str, model_type: str, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    made = transformers().AutoConfig.for_model(model_type, **config)
    model: nn.Module = getattr(transformers(), auto).from_config(made, dtype=dtype)
    return model.train()


def _complex_llama(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    return ComplexLlama(Sizes(**config)).to(dtype)


TEXT = {"num_hidden_layers": LAYERS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TINY_TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WINDOW = {"sliding_window": 5}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
TINY_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
TINY_IMAGE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}


def _text(hidden: int, ffn: int, heads: tuple[int, int, int], vocabulary: int, **more: Any) -> dict[str, Any]:
    """A configuration; ``heads`` are those of queries, of keys and values, and the size of one."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **dict(zip(names, heads, strict=True)),
        **more,
    }


def _family(title: str, model_type: str, sizes: Mapping[str, Any], **tiny: Any) -> Family:
    return Family(title, sizes, {**TINY_TEXT, **tiny}, partial(_causal, model_type))


FAMILIES = {
    "llama": _family("Llama 3 8B", "llama", _text(4096, 14_336, (32, 8, 128), 128_256, rms_norm_eps=1e-5)),
    "llama-complex": Family(
        "Llama 3 8B, complex RoPE",
        {"layers": LAYERS, "hidden": 4096, "ffn": 14_336, "heads": 32, "kv_heads": 8, "vocabulary": 128_256},
        {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocabulary": 128},
        _complex_llama,
    ),
    "qwen2": _family("Qwen2.5 7B", "qwen2", _text(3584, 18_944, (28, 4, 128), 152_064)),
    "qwen3": _family("Qwen3 8B", "qwen3", _text(4096, 12_288, (32, 8, 128), 151_936)),
    "mistral": _family(
        "Mistral 7B v0.1", "mistral", _text(4096, 14_336, (32, 8, 128), 32_000, sliding_window=4096), **WINDOW
    ),
    "gemma2": _family("Gemma 2 9B", "gemma2", _text(3584, 14_336, (16, 8, 256), 256_000, **BOTH), **WINDOW),
    "gemma3": _family(
        "Gemma 3 4B", "gemma3_text", _text(2560, 10_240, (8, 4, 256), 262_208, sliding_window=1024, **BOTH), **WINDOW
    ),
    "phi3": _family("Phi-3 mini", "phi3", _text(3072, 8192, (32, 32, 96), 32_064, sliding_window=2047), **WINDOW),
    "olmo2": _family("OLMo-2 7B", "olmo2", _text(4096, 11_008, (32, 32, 128), 100_352)),
    "gpt2": Family(
        "GPT-2",
        {"vocab_size": 50_257, "n_positions": 8192, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"vocab_size": 128, "n_embd": 64, "n_head": 4, "n_positions": 32},
        partial(_causal, "gpt2"),
    ),
    "vit": Family(
        "ViT-L/16",
        {"num_hidden_layers": LAYERS, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
        TINY_IMAGE,
        partial(_encoder, "AutoModelForImageClassification", "vit"),
        images=True,
    ),
    "siglip": Family(
        "SigLIP So400m/14",
        {
            "num_hidden_layers": LAYERS,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
        },
        TINY_IMAGE,
        partial(_encoder, "AutoModel", "siglip_vision_model"),
        images=True,
    ),
    "mixtral": _family(
        "Mixtral 8x7B", "mixtral", _text(4096, 14_336, (32, 8, 128), 32_000), num_local_experts=4, **TINY_EXPERTS
    ),
    "qwen3-moe": _family(
        "Qwen3 30B-A3B",
        "qwen3_moe",
        _text(2048, 6144, (32, 4, 128), 151_936, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
        num_experts=4,
        moe_intermediate_size=32,
        **TINY_EXPERTS,
    ),
}


def subject(name: str, dtype: torch.dtype, *, tiny: bool) -> Subject:
    """A family's model and a batch: tiny, with random weights that can be renewed; or of the published sizes, on the
    meta device."""
    family = FAMILIES[name]
    config = family.config(tiny=tiny)
    device = "cpu" if tiny else "meta"

    def made(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            return family.build(config, dtype)

    model = made(0)

    def renew(seed: int) -> dict[str, Any]:
        other = made(seed)
        perturb_gains(other, seed)
        model.load_state_dict(other.state_dict())
        return _batch(family, config, dtype, seed, device)

    batch = _batch(family, config, dtype, 0, device)
    return Subject(family.title, model, batch, renew if tiny else None)


def _batch(family: Family, config: Mapping[str, Any], dtype: torch.dtype, seed: int, device: str) -> dict[str, Any]:
    tiny = device != "meta"
    if family.images:
        side = config.get("image_size", 224)
        shape = (TINY_IMAGES if tiny else IMAGES, 3, side, side)
        return {"pixel_values": _images(shape, dtype, seed, device)}
    vocabulary = config.get("vocab_size") or config["vocabulary"]
    found = token_batch(vocabulary, TINY_TOKENS if tiny else TOKENS, seed, device)
    return found if "vocab_size" in config else {"tokens": found["input_ids"], "labels": found["labels"]}


def _images(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
