"""Block attention is attention under its mask, looks at every pair it must, and is taken only where all is certain."""

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch.nn.functional import scaled_dot_product_attention as attend

from codetta.capture import mask as mask_module
from codetta.capture.backend import backend, captured, recording
from codetta.capture.block_attention import (
    BLOCK,
    ORDERS,
    WIDE,
    block_attention,
    block_lists,
    blocks,
    why_not,
    why_not_on,
)
from codetta.capture.mask import make_attention_causal

NOW = "now block attention (flex)"
PACKED = torch.cat([torch.arange(n) for n in (70, 1, 200, 29)])


def allowed(length: int, documents: list[Tensor], window: int | None) -> Tensor:
    """The mask, pair by pair: (batch, 1, queries, keys)."""
    q, k = torch.arange(length)[:, None], torch.arange(length)
    keep = ((k <= q) & (q - k < (window or length)))[None, None]
    for table in documents:
        keep = keep & (table.view(-1, 1, length, 1) == table.view(-1, 1, 1, length))
    return keep


def exact(heads: list[Tensor], keep: Tensor) -> Tensor:
    """Attention in float64 by its formula."""
    query, key, value = (x.double() for x in heads)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ value


@st.composite
def cases(draw) -> tuple[int, int, list[Tensor], int | None]:
    """Batch, length, tables of documents of which some come back later, and a window."""
    batch, length = draw(st.integers(1, 2)), draw(st.integers(2, 3 * BLOCK + 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    tables = []
    for kind in draw(st.lists(st.sampled_from(["random", "runs", "shared"]), max_size=2)):
        rows = 1 if kind == "shared" else batch
        numbers = torch.randint(-2, 3, (rows, length), generator=generator)
        run = torch.arange(length) // draw(st.integers(1, 150))
        tables.append(numbers if kind == "random" else numbers.gather(1, run.expand(rows, -1)))
    window = draw(st.none() | st.integers(1, length + 3))
    return batch, length, tables, window


def runs(*lengths: int) -> Tensor:
    """Documents 0, 1, 0, 1, ... of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)) % 2, torch.tensor(lengths))[None]


# What is drawn seldom: full blocks; queries that only begin as their keys do; a document that comes back at the end.
SELDOM = [
    (1, 390, [], None),
    (1, 500, [], 300),
    (1, 384, [runs(192, 64, 128)], None),
    (1, 130, [runs(128, 1, 1)], None),
]


def seldom(test):
    """Also with the cases that are drawn seldom."""
    for case in SELDOM:
        test = example(case=case)(test)
    return test


@given(case=cases(), groups=st.sampled_from([1, 2]), order=st.sampled_from(ORDERS))
@settings(max_examples=20, deadline=None)
def test_is_attention_under_its_mask(case, groups, order):
    batch, length, tables, window = case
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, n, 16) for n in (2, 2 // groups, 2 // groups)]
    heads = [torch.randn(s, generator=generator).transpose(1, 2).requires_grad_() for s in shapes]
    out = block_attention(tuple(heads), block_lists(heads[0], tables, window), tables, window, None, order)
    assert out.permute(*order).is_contiguous()
    expected = exact(heads, allowed(length, tables, window))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, heads, upstream)
    for ours, theirs in zip(found, torch.autograd.grad(expected, heads, upstream.double()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_scale():
    heads = torch.randn(3, 1, 1, 200, 16, generator=torch.Generator().manual_seed(1)).unbind()
    out = block_attention(heads, block_lists(heads[0], (), 50), (), 50, 0.5, ORDERS[0])
    wanted = exact([heads[0] * 0.5 * 16**0.5, *heads[1:]], allowed(200, [], 50))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@given(case=cases())
@settings(max_examples=60, deadline=None)
@seldom
def test_no_pair_is_missed_and_full_ones_are_full(case):
    _, length, tables, window = case
    keep = allowed(length, tables, window)
    size = -(-length // BLOCK) * BLOCK
    padded = torch.zeros(*keep.shape[:2], size, size, dtype=torch.bool)
    padded[..., :length, :length] = keep
    pairs = padded.unflatten(2, (-1, BLOCK)).unflatten(4, (-1, BLOCK))
    some, every = pairs.any(5).any(3), pairs.all(5).all(3)
    needed, full = blocks(length, tables, window, torch.device("cpu"))
    assert not (some & ~needed).any()
    assert not (full & ~every).any()
    assert not (full & ~needed).any()


def test_blocks_are_tight_where_documents_come_in_order():
    """A document a block, and a window of two: nothing else is looked at, and what can go without a mask does."""
    length = 6 * BLOCK
    table = (torch.arange(length) // (2 * BLOCK))[None]
    needed, full = (b[0, 0].int().tolist() for b in blocks(length, [table], None, torch.device("cpu")))
    assert needed == [[int(j <= i and j // 2 == i // 2) for j in range(6)] for i in range(6)]
    assert full == [[int(j == i - 1 and i % 2) for j in range(6)] for i in range(6)]
    needed, full = (b[0, 0].int().tolist() for b in blocks(length, [], 2 * BLOCK, torch.device("cpu")))
    assert needed == [[int(0 <= i - j <= 2) for j in range(6)] for i in range(6)]
    assert full == [[int(i - j == 1) for j in range(6)] for i in range(6)]


@given(case=cases())
@settings(max_examples=20, deadline=None)
@seldom
def test_lists_name_the_blocks(case):
    """Each row's blocks come first, in ascending order; the second half is the transpose of the first."""
    _, length, tables, window = case
    needed, full = blocks(length, tables, window, torch.device("cpu"))
    lists = block_lists(torch.empty(1, 1, length, 16), tables, window)
    wanted = [needed & ~full, full, (needed & ~full).mT, full.mT]
    for i, pairs in enumerate(wanted):
        counts, places = lists[2 * i], lists[2 * i + 1]
        assert counts.dtype == places.dtype == torch.int32
        for row, count, numbers in zip(pairs.flatten(0, 2), counts.flatten(), places.flatten(0, 2), strict=True):
            assert numbers[:count].tolist() == row.nonzero().flatten().tolist()


@pytest.fixture
def everywhere(monkeypatch):
    """Block attention is taken on the CPU too, whoever compiles the graph."""
    monkeypatch.setattr(mask_module, "why_not_on", lambda device, inner: None)


WINDOW = {"sliding_window": 40}
MODELS = {
    "window": ("mistral", WINDOW, {}, "causal + window 40"),
    "documents": ("llama", {}, {"position_ids": PACKED}, "causal + same document (cumsum)"),
    "both": ("mistral", WINDOW, {"position_ids": PACKED}, "causal + window 40 + same document (cumsum)"),
}


@pytest.mark.parametrize(
    "what, inner",
    [("window", "aot_eager"), ("documents", "aot_eager"), ("both", "aot_eager"), ("both", "eager")],
)
def test_models(what, inner, build, everywhere):
    """Loss and gradients through the backend are those of float64, and the lists are made once for all layers."""
    name, changes, more, said = MODELS[what]
    torch._dynamo.reset()
    model = build(name, **changes)
    ids = torch.randint(0, 256, (2, len(PACKED)), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, **{k: v.expand(2, -1).contiguous() for k, v in more.items()}}
    ours = torch.compile(model, backend=partial(backend, options={"inner": inner}), fullgraph=True)
    with recording() as found:
        loss, gradients = step(ours, model, batch)
    expected, theirs = step(model.double(), model, batch)
    assert abs(loss - expected) < 1e-5
    for mine, wanted in zip(gradients, theirs, strict=True):
        assert (mine - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert {line.split(": ")[1] for g in found for line in g.attention} == {f"{said}; {NOW}, enable_gqa=True"}
    assert [c.op for c in found[-1].capture.opaque if "block" in c.op or "scaled_dot" in c.op] == [
        "block_lists",
        "block_attention",
        "block_attention",
    ]
    check_cacheable(found[-1].gm)


def step(call, model, batch):
    loss = call(**batch).loss
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def test_texts_of_any_length_keep_their_mask(build, everywhere):
    """One graph for all lengths: right, and told."""
    torch._dynamo.reset()
    model = build("mistral", **WINDOW)
    ours = torch.compile(model, backend=partial(backend, options={"inner": "aot_eager"}), dynamic=True)
    for length in (200, 333):
        ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
        with recording() as found:
            loss, gradients = step(ours, model, {"input_ids": ids, "labels": ids})
        assert all(line.endswith("block attention takes texts of one length") for g in found for line in g.attention)
        plain, wanted = step(model, model, {"input_ids": ids, "labels": ids})
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_checkpointed(build, everywhere):
    torch._dynamo.reset()
    model = build("mistral", **WINDOW)
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    plain, wanted = step(model, model, {"input_ids": ids, "labels": ids})
    model.gradient_checkpointing_enable()
    ours = torch.compile(model, backend=partial(backend, options={"inner": "aot_eager"}))
    with recording() as found:
        loss, gradients = step(ours, model, {"input_ids": ids, "labels": ids})
    assert all(NOW in line for g in found for line in g.attention)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_planned_on_the_meta_device(build):
    """Where nothing is computed, what is told is what a GPU would do; on a CPU the call keeps its mask."""
    ids = torch.zeros(2, 300, dtype=torch.long)
    (there,) = captured(build("mistral", **WINDOW).to("meta"), input_ids=ids.to("meta"), labels=ids.to("meta"))
    assert all(line.endswith(f"{NOW}, enable_gqa=True") for line in there.attention)
    (here,) = captured(build("mistral", **WINDOW), input_ids=ids, labels=ids)
    assert all("left alone" in line and line.endswith("block attention is for GPUs") for line in here.attention)


# Masks by hand, from positions of queries and keys and a table of documents (2, 300).


def causal(q, k):
    return (k <= q) & (k > q - 100)


BY_HAND = {
    "window": (lambda q, k, d: causal(q, k), True),
    "documents": (lambda q, k, d: (k <= q) & (d[:, None, :, None] == d[:, None, None, :]), True),
    "of all sequences": (lambda q, k, d: (k <= q) & (d[:1, None, :, None] == d[:1, None, None, :]), False),
    "both ways": (lambda q, k, d: causal(q, k) & (d[:, None, None, :] == d[:, None, :, None]), True),
    "unordered": (lambda q, k, d: (k > q - 100) & (d[:, None, :, None] == d[:, None, None, :]), False),
    "ahead by one": (lambda q, k, d: (k <= q + 1) & (k > q - 100), False),
    "behind by one": (lambda q, k, d: (k < q) & (k > q - 100), False),
    "two sided": (lambda q, k, d: (k - q).abs() < 100, False),
    "or": (lambda q, k, d: causal(q, k) | (k < 4), False),
    "other documents": (lambda q, k, d: (k <= q) & (d[:, None, :, None] != d[:, None, None, :]) | (k == q), False),
    "next document": (lambda q, k, d: (k <= q) & (d[:, None, :, None] + 1 == d[:, None, None, :]), False),
    "no later document": (lambda q, k, d: (k <= q) & (d[:, None, None, :] <= d[:, None, :, None]), False),
    "another's documents": (
        lambda q, k, d: (k <= q) & (d.flip(0)[:, None, :, None] == d[:, None, None, :]),
        False,
    ),
    "by head": (lambda q, k, d: (k <= q) & (d[None, :, :, None] == d[None, :, None, :]), False),
    "first sequence's": (lambda q, k, d: (k <= q) & (d[0][:, None] == d[0][None, :]), False),
    "padding": (lambda q, k, d: causal(q, k) & (d[:, None, None, :] > 0), False),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_masks_by_hand(name, capture, everywhere):
    """What is almost such a mask keeps it, and the graph means the same in any case."""
    make, taken = BY_HAND[name]

    def f(q, k, v, documents):
        return attend(q, k, v, make(torch.arange(300)[:, None], torch.arange(300)[None, :], documents))

    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(3, 2, 2, 300, 16, generator=generator).unbind()
    documents = torch.randint(0, 3, (2, 300), generator=generator)
    documents[:, 0] = 1
    graph = capture(f, *heads, documents)
    before, ops = graph.graph(*graph.inputs), graph.ops()
    (line,) = make_attention_causal(graph.graph)
    assert (NOW in line) == taken, line
    assert taken or graph.ops() == ops
    torch.testing.assert_close(graph.graph(*graph.inputs), before, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_dropout_keeps_the_mask(capture, everywhere):
    heads = torch.randn(3, 1, 2, 300, 16).unbind()

    def f(q, k, v):
        return attend(q, k, v, causal(torch.arange(300)[:, None], torch.arange(300)), dropout_p=0.1)

    (line,) = make_attention_causal(capture(f, *heads).graph)
    assert line.endswith("left alone: 300 keys and a window of 100, and block attention has no dropout")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


Q, K = meta(2, 4, 300, 64), meta(2, 2, 300, 64)
TABLE = meta(2, 300, dtype=torch.long)
DECISIONS = {
    "yes": ((Q, K, K), [TABLE, TABLE[:1], TABLE[0]], 0.0, None, None),
    "scaled": ((Q, K, K), [], 0.0, 0.5, None),
    "dropout": ((Q, K, K), [], 0.1, None, "no dropout"),
    "scale": ((Q, K, K), [], 0.0, Q, "no scale"),
    "float64": ((Q.double(), K.double(), K.double()), [], 0.0, None, "takes no torch.float64"),
    "mixed": ((Q, K.float(), K.float()), [], 0.0, None, "torch.bfloat16 and torch.float32"),
    "three": ((Q[0], K[0], K[0]), [], 0.0, None, "four dimensions"),
    "small": ((Q[..., :8], K[..., :8], K[..., :8]), [], 0.0, None, "no heads of 8"),
    "large": (tuple(meta(2, 4, 300, 288) for _ in range(3)), [], 0.0, None, "no heads of 288"),
    "groups": ((meta(2, 3, 300, 64), K, K), [], 0.0, None, "equal groups"),
    "values": ((Q, K, K[:, :1]), [], 0.0, None, "not alike"),
    "batch": ((Q, K[:1], K[:1]), [], 0.0, None, "not alike"),
    "keys": ((Q, K[:, :, :299], K[:, :, :299]), [], 0.0, None, "300 queries and 299 keys"),
    "short": (tuple(t[:, :, :128] for t in (Q, K, K)), [], 0.0, None, "128 keys are one block"),
    "longer table": ((Q, K, K), [meta(2, 301, dtype=torch.long)], 0.0, None, "another size"),
    "other table": ((Q, K, K), [meta(3, 300, dtype=torch.long)], 0.0, None, "another size"),
    "table by head": ((Q, K, K), [meta(2, 4, 300, dtype=torch.long)], 0.0, None, "another size"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name):
    heads, tables, dropout, scale, expected = DECISIONS[name]
    reason = why_not(heads, tables, dropout, scale)
    assert reason is None if expected is None else expected in reason


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    assert why_not_on(gpu, "inductor") is None
    assert why_not_on(torch.device("meta"), "eager") is None
    assert "GPUs" in why_not_on(torch.device("cpu"), "inductor")
    assert "inner='aot_eager'" in why_not_on(gpu, "aot_eager")
    assert "float64" in why_not_on(gpu, WIDE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability" in why_not_on(gpu, "inductor")
