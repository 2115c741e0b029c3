"""The LM head as graphs: what one pass over the logits reduces each row to, and the logits' gradient from that.

A loss needs a few numbers of each row of logits z, its *statistics*: the log-sum-exp, the logit at the target's column,
for smoothed labels the sum; for metrics the largest logit and, for the entropy, the mean E[z] under the softmax. The
mean is taken online, without knowing the log-sum-exp before: with u = max(z, 0) + 1 and v = max(-z, 0) + 1, both
positive, E[u] = exp(lse(z + log u) - lse(z)), and z = u - v."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from codetta.autodiff.reverse import gradients
from codetta.core.node import Node, postorder, substitute
from codetta.core.types import DType, Kind, Type, colvec, compute_dtype, i32, rowvec, tile
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.build import (
    add,
    apply,
    cast,
    input_,
    logsumexp_row,
    matmul,
    mul,
    neg,
    reduce,
    select_column,
    sum_col,
    sum_row,
)
from codetta.ir.graph import Graph
from codetta.partition.build import make_plan
from codetta.partition.plan import Plan
from codetta.rules.pipeline import simplify

LSE, TARGET, TOTAL = "lse", "target", "total"  # these have gradients
LARGEST, UPPER, LOWER = "largest", "upper", "lower"  # these are for metrics
DIFFERENTIABLE = (LSE, TARGET, TOTAL)


@dataclass(frozen=True, slots=True)
class Head:
    """A linear layer of ``features`` inputs with what follows it: the bias's dtype if there is one, the factor of the
    logits, and the cap of cap * tanh(z / cap)."""

    features: int
    dtype: DType
    bias: DType | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, linear: Node) -> Node:
        """The logits, from what the linear layer gives."""
        z = linear if self.scale == 1.0 else mul(linear, self.scale)
        if self.softcap is None:
            return z
        return mul(apply(ops.TANH, mul(z, 1.0 / self.softcap)), self.softcap)

    def linear(self, cols: int) -> tuple[Node, list[Node]]:
        """The linear layer for ``cols`` columns of the vocabulary, and its inputs."""
        x = input_("x", tile(self.features, self.dtype))
        weight = input_("weight", tile(self.features, self.dtype, rows=cols))
        product = matmul(x, weight)
        if self.bias is None:
            return product, [x, weight]
        bias = input_("bias", rowvec(cols, self.bias))
        return add(product, bias), [x, weight, bias]


def _statistics(z: Node, index: Node, wanted: tuple[str, ...]) -> dict[str, Node]:
    def shifted(x: Node) -> Node:
        return logsumexp_row(add(z, apply(ops.LOG, add(apply(ops.MAXIMUM, x, 0.0), 1.0))))

    made = {
        LSE: lambda: logsumexp_row(z),
        TARGET: lambda: select_column(z, index),
        TOTAL: lambda: sum_row(z),
        LARGEST: lambda: reduce(z, "max", Kind.COLVEC),
        UPPER: lambda: shifted(z),
        LOWER: lambda: shifted(neg(z)),
    }
    return {name: made[name]() for name in wanted}


@lru_cache(maxsize=256)
def statistics_plan(head: Head, cols: int, wanted: tuple[str, ...], stored: bool) -> Plan:
    """From x, the weight's rows of ``cols`` columns (and their bias) and the targets' columns ``index`` to the wanted
    statistics; the linear layer's outcome is ``stored`` as ``logits``, rounded once, or nowhere.

    Statistics are of what backward will see, stored logits or the accumulator. Were they of the accumulator and the
    logits stored rounded, probabilities would not sum up to one, and where a target's is nearly one, what is left of
    one minus it would be the rounding error."""
    linear, inputs = head.linear(cols)
    index = input_("index", colvec(i32))
    rounded = cast(cast(linear, head.dtype), linear.type.dtype) if stored else linear
    found = _statistics(head.logits(rounded), index, wanted)
    outputs = [(name, n) for name, n in found.items()]
    if stored:
        outputs.append(("logits", cast(linear, head.dtype)))
    return make_plan(Graph((*inputs, index), tuple(outputs)))


def _gradient(head: Head, cols: int, given: tuple[str, ...], acc: Type) -> tuple[Node, Node, list[Node]]:
    """The gradient of the linear layer's outcome ``acc``, derived, from the gradients of the ``given`` statistics and
    the log-sum-exp, which is known."""
    linear, index = input_("linear", acc), input_("index", colvec(i32))
    kept = {LSE, *given}
    found = _statistics(head.logits(linear), index, tuple(name for name in DIFFERENTIABLE if name in kept))
    cotangents = {name: input_(f"d_{name}", colvec(acc.dtype)) for name in given}
    graph = Graph((linear, index), tuple(found.items()))
    derived = gradients(graph, cotangents, [linear])[linear]
    if derived is None:
        raise PlanError(f"no statistic of {given} has a gradient")
    lse = input_(LSE, colvec(acc.dtype))  # known, and put in before anything inside it is rewritten
    (whole,) = simplify(substitute([derived], {found[LSE]: lse}), set())
    return linear, whole, [index, lse, *cotangents.values()]


@lru_cache(maxsize=256)
def gradient_plan(head: Head, cols: int, given: tuple[str, ...], outputs: tuple[str, ...], stored: bool) -> Plan:
    """The logits' gradient, ``logits``, rounded once, and the bias's, ``bias``, as asked for in ``outputs``: from the
    ``stored`` outcome of the linear layer, or with the linear layer computed again."""
    compute = compute_dtype(head.dtype)
    linear, derived, rest = _gradient(head, cols, given, tile(cols, compute))
    if stored:
        kept = input_("kept", tile(cols, head.dtype))
        again, inputs = cast(kept, compute), [kept]
    else:
        again, inputs = head.linear(cols)
    (whole,) = substitute([derived], {linear: again})
    made = {"logits": cast(whole, head.dtype), "bias": sum_col(whole)}
    used = set(postorder(made[name] for name in outputs))
    return make_plan(Graph((*inputs, *(n for n in rest if n in used)), tuple((f"d_{n}", made[n]) for n in outputs)))
