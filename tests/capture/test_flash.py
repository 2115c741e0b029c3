"""Which attention calls become FlashAttention's, and that a graph means the same with them; on PyTorch operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend

from codetta.backends.hopper import support
from codetta.capture import flash
from codetta.capture.backend import captured as plans_of
from codetta.capture.mask import make_attention_causal
from codetta.nn.attention import flash_attention


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention as if it were installed and took float32, which tells rounding from mistakes."""
    monkeypatch.setattr(support, "why_not_flash", lambda: None)
    monkeypatch.setattr(flash, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(flash, "SHORT", 8)
    monkeypatch.setattr(flash, "HEAD_SIZES", (8, 16, *flash.HEAD_SIZES))


def results(captured) -> list[Tensor]:
    outputs = captured.graph(*captured.inputs)
    wanted = [x for x in captured.inputs if isinstance(x, Tensor) and x.requires_grad]
    return [outputs[0].detach(), *torch.autograd.grad(outputs[0].sum(), wanted)]


@pytest.mark.parametrize(
    "name, dynamic", [("llama", None), ("llama", True), ("qwen3", None), ("gpt2", None), ("mistral", None)]
)
def test_models(name, dynamic, build, tokens, capture):
    """Causal attention, and Mistral's within a window of 16, of 24 tokens; grouped heads are not repeated."""
    captured = capture(build(name), input_ids=tokens, labels=tokens, dynamic=dynamic)
    before = results(captured)
    lines = make_attention_causal(captured.graph, flash=True)
    grouped = "" if name == "gpt2" else ", enable_gqa=True"
    if name == "mistral":
        made = f"causal + window 16; now FlashAttention{grouped}"
    else:
        made = f"causal; now is_causal=True{grouped}; by FlashAttention"
    assert [line.split(": ")[1] for line in lines] == [made] * 2
    calls = captured.graph.graph.find_nodes(op="call_function", target=flash_attention)
    assert [(n.kwargs["causal"], n.kwargs["window"]) for n in calls] == [(True, 16 if name == "mistral" else None)] * 2
    if grouped:
        assert all(n.args[1].meta["val"].shape[1] == 2 for n in calls)
    for ours, theirs in zip(results(captured), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def heads(
    length: int = 20, keys: int = 20, size: int = 8, groups: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """As models lay them: positions outside of heads."""
    torch.manual_seed(0)
    shapes = (2, length, 4, size), (2, keys, groups, size), (2, keys, groups, size)
    return [torch.randn(s).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


CALLS = {
    "causal": ({"is_causal": True}, heads(), "is_causal"),
    "all": ({}, heads(), "no mask"),
    "more keys": ({}, heads(keys=30), "no mask"),
    "scale": ({"is_causal": True, "scale": 0.5}, heads(), "is_causal"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_a_mask(name, capture):
    options, given, said = CALLS[name]
    captured = capture(lambda q, k, v: attend(q, k, v, enable_gqa=True, **options) * 2, *given)
    before = results(captured)
    (line,) = make_attention_causal(captured.graph, flash=True)
    assert line.endswith(f"{said}; left alone: nothing to gain; by FlashAttention")
    for ours, theirs in zip(results(captured), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


LEFT = {
    "dropout": ({"is_causal": True, "dropout_p": 0.1}, heads(), "it has no dropout"),
    "other lengths": ({"is_causal": True}, heads(keys=30), "20 queries and 30 keys"),
    "odd heads": ({"is_causal": True}, heads(size=80), "it takes no heads of 80"),
    "float64": ({"is_causal": True}, heads(dtype=torch.float64), "it takes no torch.float64"),
    "short": ({"is_causal": True}, heads(8, 8), "8 keys are few"),
}


@pytest.mark.parametrize("name", LEFT)
def test_calls_that_stay(name, capture):
    options, given, reason = LEFT[name]
    captured = capture(lambda q, k, v: attend(q, k, v, enable_gqa=True, **options) * 2, *given)
    before = captured.ops()
    (line,) = make_attention_causal(captured.graph, flash=True)
    assert line.endswith(f"; not by FlashAttention: {reason}")
    assert captured.ops() == before


def test_whoever_wants_no_flash_attention_has_none(capture, monkeypatch):
    captured = capture(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True) * 2, *heads())
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    (line,) = make_attention_causal(captured.graph, flash=True)
    assert line.endswith("not by FlashAttention: torch.backends.cuda.enable_flash_sdp(False) was called")
    monkeypatch.setattr(support, "why_not_flash", lambda: "flash-attn-4 is not installed")
    (line,) = make_attention_causal(captured.graph, flash=True)
    assert line.endswith("not by FlashAttention: flash-attn-4 is not installed")
    (line,) = make_attention_causal(captured.graph)
    assert line.endswith("nothing to gain")


def test_plans_without_kernels_leave_attention_to_pytorch(build, tokens):
    """The option is for kernels: on the CPU there are none."""
    (found,) = plans_of(build("llama"), input_ids=tokens, labels=tokens)
    assert not [line for line in found.attention if "FlashAttention" in line]
