"""Whole models and who runs them: each case a Hugging Face model with a batch, each contender a way to call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from codetta.audit.models import PRESETS, Preset, dtype_named, random_model, token_batch, transformers
from codetta.backends.hopper.support import why_not_flash
from codetta.bench.report import OURS
from codetta.errors import SettingsError, UnsupportedError
from codetta.nn.attention import flash_attention

COMPILE, CAUSAL, LIGER, EAGER = "torch.compile", "torch.compile + causal", "Liger", "eager"
FLASH = "torch.compile + FlashAttention"
NEVER = f"{OURS} without logits"
SDPA = f"{OURS} without logits + SDPA"
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A model's configuration, the sequences and tokens of a batch, and whether an optimizer steps; how many compiled
    contenders may take their first steps ``together``: what forward saved waits in an H200's memory meanwhile."""

    name: str
    config: Callable[[], Any]
    batch: tuple[int, int]
    optimizer: bool
    dtype: str = "bf16"
    together: int = 2

    @property
    def tokens(self) -> int:
        """Of a whole batch."""
        return self.batch[0] * self.batch[1]

    def build(self, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model with random weights, the same in every process, and a batch of random tokens."""
        config = self.config()
        model = random_model(config, dtype_named(self.dtype), seed=0, device=device)
        batch = token_batch(config.vocab_size, self.batch, seed=0)
        return model, {name: t.to(device) for name, t in batch.items()}


def _qwen3(layers: int) -> Any:
    """Qwen3-8B's sizes."""
    return transformers().Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40_960,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def _llama(preset: Preset, layers: int | None = None) -> Callable[[], Any]:
    return lambda: preset.config(layers)


CASES = {
    c.name: c
    for c in (
        Case("llama-3.2-1b", _llama(PRESETS["llama3-1b"]), (4, 4096), optimizer=True, together=3),
        Case("qwen3-8b", lambda: _qwen3(8), (2, 8192), optimizer=False),
        Case("llama3-8b", _llama(PRESETS["llama3-8b"], 8), (2, 8192), optimizer=False),
        Case("tiny", _llama(PRESETS["llama-tiny"], 2), (2, 64), optimizer=True, dtype="f32"),
    )
}
DEFAULT_CASE = "llama-3.2-1b"


def case_named(name: str) -> Case:
    """The case of that name."""
    if name not in CASES:
        raise SettingsError(f"no case {name!r}", hint=f"there are: {', '.join(CASES)}")
    return CASES[name]


# --- contenders -------------------------------------------------------------------------------------------------------


def _ours(model: nn.Module, options: Mapping[str, Any]) -> Call:
    return torch.compile(model, backend="codetta", options=dict(options))


def _without_logits(model: nn.Module, options: Mapping[str, Any]) -> Call:
    """The caller gets the loss alone, as it does from Liger."""
    return _ours(model, {**options, "logits": "never"})


def _without_flash(model: nn.Module, options: Mapping[str, Any]) -> Call:
    """Attention as PyTorch computes it, also where FlashAttention is installed."""
    return _without_logits(model, {**options, "attention": "sdpa"})


def _compiled(model: nn.Module, options: Mapping[str, Any]) -> Call:
    return torch.compile(model)


def _causal(model: nn.Module, options: Mapping[str, Any]) -> Call:
    """transformers builds no mask for an attention function that it does not know, so that SDPA takes its causal path
    under tracing, too. It is the same function under another name."""
    transformers()  # says what to install
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _with_attention(model, "causal_by_hand", sdpa_attention_forward)


def _flash(model: nn.Module, options: Mapping[str, Any]) -> Call:
    """Causal attention by hand again, by the kernels that ours takes where they are installed."""
    reason = why_not_flash() if next(model.parameters()).is_cuda else None
    if reason is not None:
        raise UnsupportedError("there is no FlashAttention here", hint=reason)
    return _with_attention(model, "fused_by_hand", _flash_forward)  # a "flash" in its name means a package to it


def _with_attention(model: nn.Module, name: str, attention: Callable[..., Any]) -> Call:
    """Compiled, with an attention function of that name."""
    transformers().AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return torch.compile(model)


def _flash_forward(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float | None = None, **_: object
) -> tuple[Tensor, None]:
    return flash_attention(q, k, v, causal=True, scale=scaling).transpose(1, 2), None


def _liger(model: nn.Module, options: Mapping[str, Any]) -> Call:
    """The instance patched with all of Liger's kernels for its family, the fused linear cross-entropy among them."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise UnsupportedError(f"no liger-kernel here: {error}", hint="pip install liger-kernel") from None
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=True)
    return model


def _eager(model: nn.Module, options: Mapping[str, Any]) -> Call:
    return model


# In the order of tables: others are held against the first one that was measured.
CONTENDERS: dict[str, Callable[[nn.Module, Mapping[str, Any]], Call]] = {
    COMPILE: _compiled,
    OURS: _ours,
    NEVER: _without_logits,
    SDPA: _without_flash,
    LIGER: _liger,
    CAUSAL: _causal,
    FLASH: _flash,
    EAGER: _eager,
}


def contenders_named(names: tuple[str, ...]) -> list[str]:
    """The contenders of those names in their order; all, if none is named."""
    names = tuple(name.strip() for given in names for name in given.split(","))
    for name in names:
        if name not in CONTENDERS:
            raise SettingsError(f"no contender {name!r}", hint=f"there are: {', '.join(CONTENDERS)}")
    return [c for c in CONTENDERS if not names or c in names]


# --- what a step computes ---------------------------------------------------------------------------------------------

STACKED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})  # read the same input: one GEMM


def gemm_sizes(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Columns out and in of each GEMM of a forward, those that share an input taken as one."""
    for parent in model.modules():
        linears = {n: m for n, m in parent.named_children() if isinstance(m, nn.Linear)}
        for names in STACKED:
            if names <= linears.keys():
                found = [linears.pop(n) for n in sorted(names)]
                yield sum(m.out_features for m in found), found[0].in_features
        yield from ((m.out_features, m.in_features) for m in linears.values())


def flops_of(model: nn.Module, case: Case) -> float:
    """Floating point operations of a step's GEMMs and of causal attention, forward and backward, nothing recomputed."""
    c: Any = model.config
    weights = sum(out * into for out, into in gemm_sizes(model))
    attention: int = c.num_hidden_layers * c.num_attention_heads * c.head_dim * case.batch[1]
    return 6.0 * case.tokens * (weights + attention)
