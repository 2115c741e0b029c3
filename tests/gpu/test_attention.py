"""FlashAttention's kernels as ops: against float64 and PyTorch's own, for the heads that models have; a model with it,
tied, through Inductor; and what a tied weight's gradient gets on the kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from attending import exact, heads
from codetta.backends.hopper.support import why_not_flash
from codetta.capture.backend import recording
from codetta.nn.attention import flash_attention
from codetta.testing import relative_error
from target import DEVICE, STANDIN
from ways import compiled, whole_model_agrees

pytestmark = pytest.mark.skipif(not STANDIN and why_not_flash() is not None, reason=str(why_not_flash()))

# batch, length, query heads, key heads, size, window
SHAPES = [
    (2, 512, 8, 2, 64, None),
    (1, 1000, 4, 4, 128, None),
    (2, 333, 6, 2, 64, None),
    (3, 129, 8, 2, 128, None),
    (1, 200, 4, 1, 256, None),
    (2, 515, 6, 3, 256, None),
    (2, 700, 4, 2, 64, 100),
    (1, 640, 8, 2, 128, 256),
]


def here(shape: tuple[int, ...], dtype: torch.dtype, keys: int = 0) -> list[Tensor]:
    """Heads on the device."""
    batch, length, count, groups, size, _ = shape
    return heads(sum(shape[:5]), (count, groups), length, size, dtype, batch=batch, keys=keys, device=DEVICE)


def step(f, tensors: list[Tensor], d_out: Tensor) -> list[Tensor]:
    out = f(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, d_out.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_next_to_float64(shape, dtype):
    """As near as PyTorch's own attention, within half a unit."""
    window, given = shape[5], here(shape, dtype)
    d_out = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = step(lambda *t: exact(*t, True, window), wide, d_out.to(dtype))
    theirs = step(lambda *t: exact(*t, True, window), given, d_out.to(dtype))
    ours = step(lambda *t: flash_attention(*t, causal=True, window=window), given, d_out.to(dtype))
    half = torch.finfo(dtype).eps / 4
    for a, b, w in zip(ours, theirs, wanted, strict=True):
        assert relative_error(a, w) <= 1.1 * relative_error(b, w) + half


def test_all_keys_and_more_of_them():
    given = here((2, 300, 4, 2, 64, 0), torch.bfloat16, keys=500)
    d_out = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = step(lambda *t: exact(*t, False, None), wide, d_out)
    ours = step(lambda *t: flash_attention(*t, causal=False), given, d_out)
    assert max(map(relative_error, ours, wanted)) < 5e-3


def test_the_same_bits_where_pytorch_is_deterministic():
    given = here(SHAPES[0], torch.bfloat16)
    d_out = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (step(lambda *t: flash_attention(*t, causal=True), given, d_out) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize("kind", ["llama", "window"])
def test_models(kind, cuda_only):
    """Unmodified, tied, through Inductor: attention is FlashAttention's, and all is as near to float64 as eager."""
    torch.manual_seed(0)
    if kind == "window":
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=100))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = model.to(DEVICE, torch.bfloat16)
    ids = torch.randint(0, 1000, (2, 600), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids[0, :50] = 7
    with recording() as found:
        whole_model_agrees(model, {"input_ids": ids, "labels": ids}, inner="inductor")
    said = {line.split("; ")[-1] for g in found for line in g.attention}
    assert said == {"now FlashAttention, enable_gqa=True" if kind == "window" else "by FlashAttention"}


def test_cuda_graphs(cuda_only):
    """Replayed, on other batches, to the bit what is computed without."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(DEVICE, torch.bfloat16)
    batches = torch.randint(0, 1000, (5, 2, 600), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    losses = {}
    for graphs in (False, True):
        torch._dynamo.reset()
        ours = compiled(model, inner="inductor", cudagraphs=graphs, logits="never")
        losses[graphs] = []
        for ids in batches:
            loss = ours(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()])
            model.zero_grad()
            losses[graphs].append((loss.detach().clone(), norm))
    for (a, m), (b, n) in zip(losses[False], losses[True], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(m, n, rtol=2e-3, atol=1e-5)  # sums of q's gradient come in any order
