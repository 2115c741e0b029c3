"""Explanations: exact counts, bytes beside their baselines, reasons, and the text."""

import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from codetta.audit.explain import explain
from codetta.audit.models import Request, find
from codetta.errors import SettingsError
from codetta.partition.plan import plan_text

GB = 1e9


def explain_preset(name: str, **sizes):
    subject = find(Request(name, **sizes), weights=False)
    return explain(subject.model, title=subject.title, **subject.batch)


@pytest.fixture(scope="module")
def two_layers_of_8b():
    return explain_preset("llama3-8b", layers=2)


def test_totals_are_sums_over_segments(two_layers_of_8b):
    found = two_layers_of_8b.to_json()
    assert len(found["segments"]) == 3
    for half in ("forward", "backward"):
        total = found[half]
        for key, value in total.items():
            if isinstance(value, int) and key != "opaque":
                assert value == sum(s[half][key] for s in found["segments"])
        assert total["leftovers"] == len(total["leftover_reasons"])
        assert all(total["leftover_reasons"])


def test_bytes_of_a_layers_segment(two_layers_of_8b):
    middle = two_layers_of_8b.parts[1]
    assert middle.rows == 16_384
    forward, backward = middle.forward, middle.backward
    assert forward.bytes == pytest.approx(2.42 * GB, rel=0.01)
    assert forward.bytes_boundary_fusion == pytest.approx(4.2 * GB, rel=0.03)
    assert forward.bytes_eager == pytest.approx(11.1 * GB, rel=0.02)
    assert backward.bytes == pytest.approx(3.9 * GB, rel=0.01)
    assert backward.bytes_boundary_fusion == pytest.approx(4.7 * GB, rel=0.02)
    assert backward.bytes_eager == pytest.approx(23.2 * GB, rel=0.02)
    assert middle.memory.bytes == pytest.approx(2336 * 2**20, rel=0.01)
    assert "peak bytes: 2.45 GB above the inputs, of them 1.68 GB between forward and backward" in str(two_layers_of_8b)


def test_gemms_are_counted_in_flops(two_layers_of_8b):
    rows, width, ffn, qkv, vocabulary = 16_384, 4096, 14_336, 6144, 128_256
    layer = width * (width + 2 * ffn + ffn + qkv)
    assert two_layers_of_8b.forward.flops == 2 * rows * (2 * layer + width * vocabulary)
    assert two_layers_of_8b.backward.flops == 2 * two_layers_of_8b.forward.flops


def test_the_least_time_is_less_where_less_is_moved(two_layers_of_8b):
    for half in (two_layers_of_8b.forward, two_layers_of_8b.backward):
        for times in half.seconds.values():
            assert 0 < times["programs"] < times["boundary_fusion"] < times["eager"]


def test_every_opaque_call_has_a_reason(two_layers_of_8b):
    calls = two_layers_of_8b.opaque
    names = {o.name for o in calls}
    assert {"embedding", "scaled_dot_product_attention", "matmul", "cos", "sin"} <= names
    assert all(o.reason for o in calls)
    attention = next(o for o in calls if o.name == "scaled_dot_product_attention")
    assert attention.count == attention.differentiable == 2
    matmul = next(o for o in calls if o.name == "matmul")
    assert (matmul.count, matmul.differentiable) == (1, 0)  # the RoPE table's, which is not ours


@pytest.mark.parametrize("memory, again", [("fast", 0), ("lean", 1)])
def test_a_loss_head_is_programs(memory, again):
    """A head whose logits nobody gets is counted with the programs, its loop over slabs as one, and is no opaque call.
    Bytes by hand: exponentials in bf16 if they are kept, one sum a tile of 128 columns, in backward the logits'
    gradient where they are computed again, and the input's, which is a float32 sum where there are slabs; else x times
    each row's factor."""
    subject = find(Request("llama3-8b", layers=1), weights=False)
    found = explain(subject.model, options={"logits": "never", "memory": memory}, title="8B", **subject.batch)
    rows, width, vocabulary, head = 16_384, 4096, 128_256, found.parts[-1]
    assert not any("loss" in o.name or "cross_entropy" in o.name for o in found.opaque)
    assert head.rows == rows
    assert (head.forward.gemms, head.forward.epilogues, head.forward.finalizes) == (1, 1, 1)
    assert (head.backward.gemms, head.backward.epilogues, head.backward.leftovers) == (2 + again, 1, 1 - again)
    gemm = 2 * rows * width * vocabulary
    assert (head.forward.flops, head.backward.flops) == (gemm, (2 + again) * gemm)
    logits, sums, vector = 2 * rows * vocabulary, 4 * rows * width, 4 * rows
    parts = vocabulary // 128 * vector
    assert head.forward.bytes == (0 if again else logits + vector) + 2 * parts + 3 * vector
    assert head.note.endswith("a loop over 36 slabs of 3,584 columns" if again else "backward as one slab")
    slabs = 36 if again else 0
    d_logits = logits + 4 * vector if again else 2 * vector + 2 * 2 * rows * width
    assert head.backward.bytes == d_logits + 2 * rows * width + 2 * slabs * sums
    assert head.backward.weight_gradient_bytes == 2 * width * vocabulary
    assert head.backward.bytes < head.backward.bytes_eager
    held = sums if again else logits
    assert head.memory.bytes == held + 2 * width * vocabulary + 2 * rows * width  # the gradients, rounded
    text = str(found)
    held = "logits computed again" if again else "exponentials of logits kept"
    assert f"a linear layer with its loss, {memory}: {held}, backward as" in text
    assert ("logsumexp_row(" if again else "exp(") in text.partition("a linear layer with its loss")[2]
    json.dumps(found.to_json())


def test_equal_layers_are_shown_once():
    found = explain_preset("llama-tiny", layers=5)
    assert len(found.plans) == 3
    text = str(found)
    assert "=== segment 1: model.layers.0 and model.layers.1, M = 512; segments 2-4, to model.layers.3" in text
    assert text.count("def gate_proj_up_proj(") == 2  # the layer's, and the last one's


def test_programs_are_printed_in_whole_lines(two_layers_of_8b):
    lines = set(str(two_layers_of_8b).splitlines())
    for plans in two_layers_of_8b.plans.values():
        for plan in plans:
            assert set(plan_text(plan).splitlines()) <= lines
    assert max(map(len, lines)) > 200


def test_a_cache_that_is_returned_is_a_note():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).train()
    ids = torch.ones(1, 8, dtype=torch.long)
    advice = "use_cache = False"
    assert any(advice in n for n in explain(model, {"input_ids": ids, "labels": ids}).notes)
    assert not any(advice in n for n in explain(model, {"input_ids": ids, "labels": ids, "use_cache": False}).notes)


def test_a_model_of_any_kind_and_a_tensor():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.b(torch.tanh(self.a(x)))

    found = explain(Gated(), torch.randn(8, 16))
    assert found.forward.gemms == 2
    assert found.forward.leftovers == 0
    assert found.parts[0].rows == 8
    json.dumps(found.to_json())


def test_nothing_understood_is_a_note():
    found = explain(nn.ReLU(), torch.randn(8, 16))
    assert found.forward.gemms == 0
    assert any("nothing was understood" in n for n in found.notes)


def test_without_gradients_there_is_no_backward():
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)).requires_grad_(False)
    found = explain(model, torch.randn(8, 16))
    assert (found.forward.gemms, found.backward.gemms) == (2, 0)


def test_options_reach_the_backend():
    lean, fast = (explain_with_memory(memory) for memory in ("lean", "fast"))
    assert lean.backward.bytes > fast.backward.bytes
    with pytest.raises(SettingsError, match="option memory='huge'"):
        raise_inner(lambda: explain_with_memory("huge"))


def explain_with_memory(memory: str):
    subject = find(Request("llama-tiny", layers=2), weights=False)
    return explain(subject.model, options={"memory": memory}, **subject.batch)


def raise_inner(call):
    """Run, and raise what torch.compile wrapped."""
    try:
        call()
    except Exception as error:
        raise getattr(error, "inner_exception", error) from None


def test_programs_that_are_no_single_kernel_are_named():
    """A width that no tile of TMA fits: on a Hopper GPU the epilogue is a second launch, and explain says so. Its
    sibling of another width keeps its kernel."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 27, bias=False), nn.Linear(16, 24, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(self.a(x)), torch.tanh(self.b(x))

    found = explain(Odd().bfloat16(), torch.randn(8, 16, dtype=torch.bfloat16))
    named = [n for n in found.notes if "Hopper" in n]
    assert any(
        "Hopper GPU a would run as a GEMM and a generated kernel behind it: 27 columns are no multiple of 8" in n
        for n in named
    )
    assert not any("Hopper" in n for n in explain(Odd(), torch.randn(8, 16)).notes)
