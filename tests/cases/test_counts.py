"""The exact numbers of GEMMs, finalizes and leftovers of a Llama of transformers, whole graph, with labels."""

from collections import Counter
from functools import cache

import pytest
import torch

from codetta.capture.backend import CapturedGraph, captured
from ways import backward_plans, counts, data_gradients_with_epilogue, forward_plans, llama

TABLE = {"to", "matmul", "cat", "cos", "sin", "mul"}  # of the rotation, in model.rotary_emb
POSITIONS = {"arange", "add"}
LABEL_SHIFT = {"pad"}


@cache
def capture(
    layers: int, tied: bool = False, biased: bool = False, batch: int = 1, dtype: torch.dtype = torch.float32
) -> CapturedGraph:
    """The one graph of a model without memory."""
    torch._dynamo.reset()
    changes = {"tie_word_embeddings": tied, "attention_bias": biased, "mlp_bias": biased}
    with torch.device("meta"):
        model, ids = llama(layers, dtype, **changes), torch.zeros(batch, 12, dtype=torch.long)
    (graph,) = captured(model, input_ids=ids, labels=ids)
    return graph


def operator(call) -> str:
    return call.op.split(".")[1]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_whole_graph(layers, tied, biased, batch):
    """Forward: 4L+1 GEMMs, each with an epilogue; one leftover, the first norm's statistic and gain; 2L+1 finalizes, a
    statistic a norm and the loss. Backward: 8L+2 GEMMs, of which exactly 3L+1 data gradients have an epilogue (that of
    each o-projection feeds attention and has none); L+1 leftovers, which rotate dqkv back, one a layer, and make
    dlogits; 3L+1 finalizes. The biases of q, k, v are one, those of gate and up are, and each adds a finalize."""
    graph = capture(layers, tied, biased, batch)
    forward, backward = forward_plans([graph]), backward_plans([graph])
    gemms = 4 * layers + 1
    assert counts(forward) == {"gemms": gemms, "epilogues": gemms, "finalizes": 2 * layers + 1, "leftovers": 1}
    assert counts(backward) == {
        "gemms": 8 * layers + 2,
        "epilogues": 3 * layers + 1,
        "finalizes": 3 * layers + 1 + 4 * layers * biased,
        "leftovers": layers + 1,
    }
    assert len(data_gradients_with_epilogue(backward)) == 3 * layers + 1


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_where_they_are(layers):
    """The segments lie between the attentions: from the embedding to the first qkv, from each attention to the next
    qkv, from the last one to the loss. Each rotates the gradient of its qkv back or makes dlogits: one leftover."""
    graph = capture(layers, False, False, 1)
    forward, backward = forward_plans([graph]), backward_plans([graph])
    assert [p.count("gemm") for p in forward] == [1] + [4] * layers
    assert [p.count("leftover") for p in forward] == [1] + [0] * layers
    assert [p.count("finalize") for p in forward] == [0] + [2] * (layers - 1) + [3]
    assert [p.count("gemm") for p in backward] == [2] + [8] * layers
    assert [p.count("leftover") for p in backward] == [1] * (layers + 1)
    assert not any(p.count("prepare") for p in forward + backward)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_nothing_is_left_unexplained(layers, tied):
    """What stays with PyTorch is the embedding, attention, the table of the rotation with its positions, and the shift
    of the labels. The mask is proven to be causal, and gone. Each such call and each leftover says why."""
    graph = capture(layers, tied, False, 1)
    opaque = graph.capture.opaque
    assert all(call.reason for call in opaque)
    found = Counter(operator(call) for call in opaque if not call.module.endswith("rotary_emb"))
    assert found.pop("embedding") == 1
    assert found.pop("scaled_dot_product_attention") == layers
    assert set(found) <= POSITIONS | LABEL_SHIFT
    assert {operator(call) for call in opaque if call.module.endswith("rotary_emb")} <= TABLE
    steps = [s for plan in forward_plans([graph]) + backward_plans([graph]) for s in plan.steps]
    assert all(s.reason for s in steps if s.kind == "leftover")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    """The same numbers in bfloat16 and in float64."""
    graph = capture(2, dtype=dtype)
    assert counts(forward_plans([graph])) == {"gemms": 9, "epilogues": 9, "finalizes": 5, "leftovers": 1}
    assert counts(backward_plans([graph])) == {"gemms": 18, "epilogues": 7, "finalizes": 7, "leftovers": 3}


def test_float16_leaves_the_row_scale_in_place():
    """In float16 a product without its row scale may overflow, so no scale moves: each of the 2L+1 norms is applied by
    a leftover of its own, except for the first, which always is one."""
    graph = capture(2, dtype=torch.float16)
    assert counts(forward_plans([graph]))["gemms"] == 9
    assert counts(forward_plans([graph]))["leftovers"] == 5
    assert counts(backward_plans([graph]))["gemms"] == 18
