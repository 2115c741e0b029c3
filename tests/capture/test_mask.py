"""A mask is called causal only if it is: models, hand-written masks, and masks that are almost causal."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import ViTConfig, ViTForImageClassification

from codetta.capture.mask import SDPA, Facts, make_attention_causal, prove
from codetta.capture.normalise import normalise

aten = torch.ops.aten
CAUSAL = Facts(causal=True)


def masks(captured):
    calls = captured.graph.graph.find_nodes(op="call_function", target=SDPA)
    return list(dict.fromkeys(n.args[3] for n in calls if len(n.args) > 3 and n.args[3] is not None))


def value_of(node, captured):
    """What a node of the captured graph is, in numbers."""

    class Reader(Interpreter):
        def run_node(self, n):
            found[n] = super().run_node(n)
            return found[n]

    found = {}
    with torch.no_grad():
        Reader(captured.graph).run(*captured.inputs)
    return found[node]


def hides_what_it_should(facts, mask):
    """Whether a mask in numbers is exactly what is claimed about it, for claims that need no data."""
    queries, keys = mask.shape[-2:]
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    expected = torch.ones(queries, keys, dtype=torch.bool)
    if facts.causal:
        expected &= k <= q
    if facts.window is not None:
        expected &= k > q - facts.window
    allowed = mask if mask.dtype is torch.bool else mask == 0
    return torch.equal(allowed.expand(*allowed.shape[:-2], queries, keys), expected.expand(allowed.shape))


MODELS = [
    ("llama", None, ["causal"]),
    ("llama", True, ["causal"]),
    ("qwen3", None, ["causal"]),
    ("gpt2", None, ["causal"]),
    ("mistral", None, ["causal + window 16"]),
    ("gemma2", True, ["causal + window 16", "causal"]),
]


@pytest.mark.parametrize("name, dynamic, expected", MODELS)
def test_attention_of_models(name, dynamic, expected, build, tokens, capture):
    captured = capture(build(name), input_ids=tokens, labels=tokens, dynamic=dynamic)
    found = masks(captured)
    assert [str(prove(m)) for m in found] == expected
    assert all(hides_what_it_should(prove(m), value_of(m, captured)) for m in found)
    before = loss_and_gradients(captured)
    lines = make_attention_causal(captured.graph)
    for ours, theirs in zip(loss_and_gradients(captured), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    if expected == ["causal"]:
        grouped = ", enable_gqa=True" if name != "gpt2" else ""
        assert [line.split(": ")[1] for line in lines] == [f"causal; now is_causal=True{grouped}"] * 2
        assert_no_mask_left(captured)
    if name == "llama":
        assert [line.split(": ")[0] for line in lines] == [f"model.layers.{i}.self_attn" for i in (0, 1)]


def assert_no_mask_left(captured):
    count = Counter(captured.ops())
    assert not {"aten.cumsum.default", "aten.diff.default", "aten.le.Tensor", "aten.index.Tensor"} & {*count}
    assert count["aten.scaled_dot_product_attention.default"] == 2
    for call in captured.graph.graph.find_nodes(op="call_function", target=SDPA):
        assert call.args[3:] == (None, 0.0, True)
        assert call.args[1].target is not aten.reshape.default


def loss_and_gradients(captured):
    outputs = captured.graph(*captured.inputs)
    wanted = [x for x in captured.inputs if isinstance(x, Tensor) and x.requires_grad]
    return [outputs[0].detach(), *torch.autograd.grad(outputs[0], wanted)]


@pytest.mark.parametrize("length", [16, 17])
def test_a_window_counts_only_where_it_is_shorter_than_the_text(length, build, tokens, capture):
    tokens = tokens[:, :length]
    captured = capture(build("mistral", num_hidden_layers=1), input_ids=tokens, labels=tokens)
    (line,) = make_attention_causal(captured.graph)
    assert line.endswith(
        "now is_causal=True, enable_gqa=True"
        if length == 16
        else "17 keys and a window of 16, and block attention is for GPUs"
    )


GIVEN = {
    "attention_mask": (
        lambda n: torch.ones(2, n, dtype=torch.long),
        "causal + key padding (attention_mask)",
        "attention's causal path knows no padding",
    ),
    "position_ids": (
        lambda n: torch.arange(n).expand(2, n).contiguous(),
        "causal + same document (cumsum)",
        "attention's causal path knows no documents",
    ),
    "4-D": (
        lambda n: torch.ones(2, 1, n, n, dtype=torch.bool).tril(),
        "unknown (attention_mask[a0, 0, a2, a3])",
        "it is not exactly causal",
    ),
}


@pytest.mark.parametrize(
    "what, dynamic",
    [("attention_mask", None), ("position_ids", None), ("position_ids", True), ("4-D", None)],
)
def test_data_is_never_taken_for_causal(what, dynamic, build, tokens, capture):
    make, expected, reason = GIVEN[what]
    given = {"attention_mask" if what == "4-D" else what: make(24)}
    model = build("llama", num_hidden_layers=1)
    captured = capture(model, input_ids=tokens, labels=tokens, dynamic=dynamic, **given)
    (mask,) = masks(captured)
    assert str(prove(mask)) == expected
    before = captured.ops()
    lines = make_attention_causal(captured.graph)
    assert all(f"left alone: {reason}" in line for line in lines)
    assert captured.ops() == before


def test_a_mask_that_hides_nothing_is_dropped(capture):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    model, image = ViTForImageClassification(config).eval(), torch.randn(2, 3, 16, 16)
    captured = capture(model, pixel_values=image)
    before = captured.graph(*captured.inputs)
    assert [str(prove(m)) for m in masks(captured)] == ["all true"]
    lines = make_attention_causal(captured.graph)
    assert [line.split(": ")[1] for line in lines] == ["all true; now no mask"] * 2
    assert masks(captured) == []
    torch.testing.assert_close(captured.graph(*captured.inputs), before)


# Masks by hand, from (queries, keys) positions.


def positions(q, k):
    return torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]


def lowest(q):
    return torch.finfo(q.dtype).min


BY_HAND = {
    "tril": (lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), "causal"),
    "not triu": (lambda q, k: ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), "causal"),
    "bias by triu": (lambda q, k: torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(1), "causal"),
    "bias by where": (
        lambda q, k: torch.where(positions(q, k)[1] <= positions(q, k)[0], 0.0, lowest(q)),
        "causal",
    ),
    "bias by fill": (
        lambda q, k: torch.zeros(q.shape[2], k.shape[2]).masked_fill(
            positions(q, k)[1] > positions(q, k)[0], float("-inf")
        ),
        "causal",
    ),
    "shifted twice": (lambda q, k: positions(q, k)[1] + 3 <= positions(q, k)[0] + 3, "causal"),
    "always the same": (lambda q, k: positions(q, k)[0].mT == positions(q, k)[1], "all true"),
    "window": (
        lambda q, k: (positions(q, k)[0] >= positions(q, k)[1]) & (positions(q, k)[0] - positions(q, k)[1] < 5),
        "causal + window 5",
    ),
    "everything": (lambda q, k: positions(q, k)[0] + positions(q, k)[1] >= 0, "all true"),
    "constant": (lambda q, k: torch.zeros(q.shape[2], k.shape[2], dtype=torch.long) == 0, "all true"),
    "one row": (lambda q, k: positions(q, k)[1] <= torch.zeros(1, 1, dtype=torch.long), "unknown"),
    "tril 1": (lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1), "unknown"),
    "tril -1": (lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1), "unknown"),
    "triu": (lambda q, k: torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(), "window 1"),
    "weak bias": (lambda q, k: torch.full((q.shape[2], k.shape[2]), -1e4).triu(1), "unknown"),
    "either": (lambda q, k: (positions(q, k)[1] <= positions(q, k)[0]) | (positions(q, k)[1] < 2), "unknown"),
    "nothing": (lambda q, k: torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool), "unknown"),
    "from the end": (
        lambda q, k: positions(q, k)[1][:, positions(q, k)[1][0] - 1] <= positions(q, k)[0],
        "unknown",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_masks_by_hand(name, capture):
    make, expected = BY_HAND[name]
    q, k, v = torch.randn(3, 2, 2, 8, 4).unbind()
    captured = capture(lambda q, k, v: attend(q, k, v, make(q, k)), q, k, v, dynamic=True)
    before = captured.graph(*captured.inputs)
    (mask,) = masks(captured)
    facts = prove(mask)
    assert ("unknown" if facts.unknown else str(facts)) == expected
    if not facts.unknown:
        assert hides_what_it_should(facts, value_of(mask, captured))
    lines = make_attention_causal(captured.graph)
    assert ("left alone" in lines[0]) == (facts not in (CAUSAL, Facts()))
    torch.testing.assert_close(captured.graph(*captured.inputs), before, equal_nan=True)


def swap(node):
    node.args = (node.args[1], node.args[0])


def to(target):
    return lambda node: setattr(node, "target", target)


def argument(position, value):
    return lambda node: node.update_arg(position, value)


NEARLY = {
    "le to lt": ("aten.le.Tensor", to(aten.lt.Tensor)),
    "le to ge": ("aten.le.Tensor", to(aten.ge.Tensor)),
    "swapped": ("aten.le.Tensor", swap),
    "shifted": ("aten.add.Tensor", argument(1, 1)),
    "first minus 2": ("aten.sub.Tensor", argument(1, 2)),
    "second difference": ("aten.diff.default", argument(1, 2)),
    "eq to ne": ("aten.eq.Tensor", to(aten.ne.Tensor)),
    "ne 2": ("aten.ne.Scalar", argument(1, 2)),
    "or": ("aten.__and__.Tensor", to(aten.__or__.Tensor)),
}


@pytest.mark.parametrize("dynamic", [None, True])
def test_nearly_causal_is_not_causal(dynamic, build, tokens, capture):
    captured = capture(build("llama", num_hidden_layers=1), input_ids=tokens, labels=tokens, dynamic=dynamic)
    (mask,) = masks(captured)
    assert prove(mask) == CAUSAL
    noticed = Counter()
    for change, (target, apply) in NEARLY.items():
        for node in [n for n in cone(mask) if str(n.target) == target]:
            before = (node.target, node.args)
            apply(node)
            captured.graph.recompile()
            claimed, true = prove(mask) == CAUSAL, tril_in_numbers(mask, captured)
            assert true or not claimed, (change, node.format_node())
            noticed[change] += not claimed
            node.target, node.args = before
    assert all(noticed[change] for change in NEARLY), noticed


PACKED = [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 2, 3, 4, 5, 6], [*range(20), *range(4)]]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name, expected", [("llama", "causal"), ("mistral", "causal + window 16")])
def test_packed_documents(name, expected, dynamic, build, tokens, capture):
    """Causal within documents, from positions that start again, and within a window: as told, in numbers too. What is
    nearly so is told as what it is, or as unknown."""
    model = build(name, num_hidden_layers=1)
    captured = capture(model, input_ids=tokens, labels=tokens, position_ids=torch.tensor(PACKED), dynamic=dynamic)
    (mask,) = masks(captured)
    assert str(prove(mask)) == f"{expected} + same document (cumsum)"
    assert hides_other_documents(mask, captured)
    documents = value_of(prove(mask).documents[0], captured)
    starts = torch.tensor(PACKED).eq(0).cumsum(-1)
    assert torch.equal(documents - documents[:, :1], starts - 1)
    noticed, changes = Counter(), {**NEARLY, "gt to ge": ("aten.gt.Tensor", to(aten.ge.Tensor))}
    for change, (target, apply) in changes.items():
        for node in [n for n in cone(mask) if str(n.target) == target]:
            before = (node.target, node.args)
            apply(node)
            captured.graph.recompile()
            assert hides_other_documents(mask, captured), (change, node.format_node())
            noticed[change] += str(prove(mask)) != f"{expected} + same document (cumsum)"
            node.target, node.args = before
    told = {"le to lt", "le to ge", "swapped", "shifted", "eq to ne"} | ({"gt to ge"} if name == "mistral" else set())
    assert all(noticed[change] for change in told), noticed


def hides_other_documents(mask, captured):
    """Whether a mask in numbers is what was proven of it, its documents taken from the graph; or nothing was, or the
    graph does not run."""
    facts = prove(mask)
    if facts.unknown or facts.padding:
        return True
    try:
        found = value_of(mask, captured)
        tables = [value_of(table, captured) for table in facts.documents]
    except (IndexError, RuntimeError):  # the changed graph does not run
        return True
    expected = torch.ones_like(found)
    q, k = torch.arange(found.shape[-2])[:, None], torch.arange(found.shape[-1])
    if facts.causal:
        expected &= k <= q
    if facts.window is not None:
        expected &= k > q - facts.window
    for table in tables:
        expected &= (table[:, :, None] == table[:, None, :])[:, None]
    return torch.equal(found, expected)


def cone(node):
    found = {node}
    while more := {m for n in found for m in n.all_input_nodes} - found:
        found |= more
    return [n for n in node.graph.nodes if n in found]


def tril_in_numbers(mask, captured):
    try:
        return hides_what_it_should(CAUSAL, value_of(mask, captured))
    except (IndexError, RuntimeError):  # the changed graph does not run
        return False


def test_written_memory_proves_nothing(capture):
    def f(q, k, v):
        limit = torch.arange(8)
        other = limit[2:]
        mask = limit <= limit[:, None]
        other.add_(5)
        return attend(q, k, v, mask) + (limit + other.sum()).sum()

    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    captured = capture(f, q, k, v)
    (mask,) = masks(captured)
    assert prove(mask).unknown == ("made from memory that is written to",)


def test_cross_attention_is_left_alone(capture):
    q, k, v = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    captured = capture(lambda q, k, v: attend(q, k, v, BY_HAND["tril"][0](q, k)), q, k, v)
    assert "6 queries and 8 keys" in make_attention_causal(captured.graph)[0]


def test_a_mask_with_a_gradient_is_left_alone(capture):
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    bias = torch.zeros(8, 8, requires_grad=True)
    captured = capture(attend, q, k, v, bias)
    assert "left alone: the mask has a gradient" in make_attention_causal(captured.graph)[0]


@pytest.mark.parametrize("spelling", ["expand", "repeat_interleave", "only the keys"])
def test_repeated_heads(spelling, capture):
    def repeat(x):
        if spelling == "repeat_interleave":
            return x.repeat_interleave(3, 1)
        return x[:, :, None].expand(2, 2, 3, 8, 4).reshape(2, 6, 8, 4)

    def f(q, k, v):
        return attend(q, repeat(k), repeat(v) if spelling != "only the keys" else v.repeat(1, 3, 1, 1), is_causal=True)

    q, (k, v) = torch.randn(2, 6, 8, 4, requires_grad=True), torch.randn(2, 2, 2, 8, 4).unbind()
    captured = capture(f, q, k.requires_grad_(), v.requires_grad_())
    before = [t.clone() for t in run(captured)]
    (line,) = make_attention_causal(captured.graph)
    if spelling == "only the keys":
        assert line.endswith("left alone: nothing to gain")
    else:
        assert line.endswith("is_causal; now is_causal=True, enable_gqa=True")
        assert captured.ops() == ["aten.scaled_dot_product_attention.default"]
    for ours, theirs in zip(run(captured), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def run(captured):
    (out,) = captured.graph(*captured.inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), captured.inputs)]


def test_a_guard_keeps_the_proof_true(build, tokens):
    torch._dynamo.reset()
    seen, model = [], build("mistral", num_hidden_layers=1)

    def backend(gm, example_inputs):
        graph = normalise(gm, example_inputs)
        seen.extend(make_attention_causal(graph))
        return graph

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for length in (10, 16, 24, 12):
        ids = tokens[:, :length].contiguous()
        loss = compiled(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss, rtol=1e-5, atol=1e-6)
    assert ["left alone" in line for line in seen] == [False, True]
