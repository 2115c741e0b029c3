"""The LM head as graphs: what one pass over the logits reduces each row to, and the logits' gradient from that.

A loss needs a few numbers of each row of logits z, its *statistics*: the log-sum-exp, the logit at the target's column,
for smoothed labels the sum; for metrics the largest logit and, for the entropy, the mean E[z] under the softmax. The
mean is taken online, without knowing the log-sum-exp before: with u = max(z, 0) + 1 and v = max(-z, 0) + 1, both
positive, E[u] = exp(lse(z + log u) - lse(z)), and z = u - v.

Logits of four bytes and more are first shifted by a number of each row, about the target's logit: where the target is
all but certain, its logit and the log-sum-exp are then near zero, and what is left of one minus its probability is no
difference of two large numbers. Narrow logits are rounded by more than that."""

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
    sub,
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

    @property
    def shifts(self) -> bool:
        """Whether logits are shifted by ``shift``, a number of each row."""
        return self.dtype.bytes > 2

    def shifted(self, linear: Node) -> tuple[Node, list[Node]]:
        """The logits as statistics are taken of them, and the shift if there is one."""
        z = self.logits(linear)
        if not self.shifts:
            return z, []
        shift = input_("shift", colvec(linear.type.dtype))
        return sub(z, shift), [shift]

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


def statistics_graph(head: Head, cols: int, wanted: tuple[str, ...], stored: bool) -> Graph:
    """From x, the weight's rows of ``cols`` columns (and their bias) and the targets' columns ``index`` to the wanted
    statistics; the linear layer's outcome is ``stored`` as ``logits``, rounded once, or nowhere.

    Statistics are of what backward will see, stored logits or the accumulator. Were they of the accumulator and the
    logits stored rounded, probabilities would not sum up to one, and where a target's is nearly one, what is left of
    one minus it would be the rounding error."""
    linear, inputs = head.linear(cols)
    index = input_("index", colvec(i32))
    rounded = cast(cast(linear, head.dtype), linear.type.dtype) if stored else linear
    z, shift = head.shifted(rounded)
    found = _statistics(z, index, wanted)
    outputs = [(name, n) for name, n in found.items()]
    if stored:
        outputs.append(("logits", cast(linear, head.dtype)))
    return Graph((*inputs, index, *shift), tuple(outputs))


@lru_cache(maxsize=256)
def statistics_plan(head: Head, cols: int, wanted: tuple[str, ...], stored: bool) -> Plan:
    """The programs of that."""
    return make_plan(statistics_graph(head, cols, wanted, stored))


def _derived(head: Head, cols: int, given: tuple[str, ...], acc: Type) -> tuple[Node, Node, list[Node]]:
    """The gradient of the linear layer's outcome ``acc``, derived, from the gradients of the ``given`` statistics and
    the log-sum-exp, which is known."""
    linear, index = input_("linear", acc), input_("index", colvec(i32))
    kept = {LSE, *given}
    z, shift = head.shifted(linear)
    found = _statistics(z, index, tuple(name for name in DIFFERENTIABLE if name in kept))
    cotangents = {name: input_(f"d_{name}", colvec(acc.dtype)) for name in given}
    graph = Graph((linear, index, *shift), tuple(found.items()))
    derived = gradients(graph, cotangents, [linear])[linear]
    if derived is None:
        raise PlanError(f"no statistic of {given} has a gradient")
    lse = input_(LSE, colvec(acc.dtype))  # known, and put in before anything inside it is rewritten
    (whole,) = simplify(substitute([derived], {found[LSE]: lse}), set())
    return linear, whole, [index, *shift, lse, *cotangents.values()]


def _gradient(head: Head, cols: int, given: tuple[str, ...], stored: bool) -> tuple[Node, list[Node]]:
    """The gradient of the linear layer's outcome and the inputs it may read: from the ``stored`` outcome, or with the
    linear layer computed again."""
    compute = compute_dtype(head.dtype)
    linear, derived, rest = _derived(head, cols, given, tile(cols, compute))
    if stored:
        kept = input_("kept", tile(cols, head.dtype))
        again, inputs = cast(kept, compute), [kept]
    else:
        again, inputs = head.linear(cols)
    (whole,) = substitute([derived], {linear: again})
    return whole, [*inputs, *rest]


@lru_cache(maxsize=256)
def gradient_plan(head: Head, cols: int, given: tuple[str, ...], outputs: tuple[str, ...], stored: bool) -> Plan:
    """The logits' gradient, ``logits``, rounded once, and the bias's, ``bias``, as asked for in ``outputs``: from the
    ``stored`` outcome of the linear layer, or with the linear layer computed again."""
    whole, inputs = _gradient(head, cols, given, stored)
    made = {"logits": cast(whole, head.dtype), "bias": sum_col(whole)}
    return _plan(inputs, {f"d_{n}": made[n] for n in outputs})


@lru_cache(maxsize=256)
def weight_plan(dtype: DType, cols: int, features: int) -> Plan:
    """The weight's gradient from the logits' ``gradient`` and ``x``: a GEMM alone."""
    gradient, x = input_("gradient", tile(cols, dtype)), input_("x", tile(features, dtype))
    return make_plan(Graph((gradient, x), (("d_weight", cast(matmul(gradient, x, "tn"), dtype)),)))


@lru_cache(maxsize=256)
def exponentials_plan(head: Head, cols: int) -> Plan:
    """From x, weight, ``index`` and a number ``near`` each row's logits to exp(z - near), ``held``, rounded once; and
    less ``near`` the log-sum-exp and the target's logit, from what is not rounded."""
    linear, (x, weight) = head.linear(cols)
    index, near = input_("index", colvec(i32)), input_("near", colvec(linear.type.dtype))
    z = sub(head.logits(linear), near)
    e = apply(ops.EXP, z)
    found = (LSE, apply(ops.LOG, sum_row(e))), (TARGET, select_column(z, index)), ("held", cast(e, head.dtype))
    return make_plan(Graph((x, weight, index, near), found))


@lru_cache(maxsize=256)
def from_exponentials_plan(head: Head, cols: int, wanted: tuple[str, ...]) -> Plan:
    """The gradients ``wanted`` of x and weight, where the logits' are ``held`` times a ``factor`` of each row. Run is
    that of x; ``weight_plan`` gets x times the factor, in memory that the input's gradient takes afterwards."""
    held, factor = input_("held", tile(cols, head.dtype)), input_("factor", colvec(compute_dtype(head.dtype)))
    x, weight, *_ = head.linear(cols)[1]
    made = {
        "x": lambda: cast(mul(matmul(held, weight, "nn"), factor), head.dtype),
        "weight": lambda: cast(matmul(held, cast(mul(x, factor), head.dtype), "tn"), head.dtype),
    }
    return _plan([held, x, weight, factor], {f"d_{n}": made[n]() for n in wanted})


@lru_cache(maxsize=256)
def backward_plan(head: Head, cols: int, given: tuple[str, ...], wanted: tuple[str, ...], stored: bool) -> Plan:
    """All of backward, the gradients ``wanted`` of x, weight and bias, for whoever counts and reads: run is
    ``gradient_plan`` for each slab, with GEMMs of the library's behind it."""
    whole, inputs = _gradient(head, cols, given, stored)
    rounded = cast(whole, head.dtype)
    x, weight, *_ = head.linear(cols)[1]
    made = {
        "x": lambda: cast(matmul(rounded, weight, "nn"), head.dtype),
        "weight": lambda: cast(matmul(rounded, x, "tn"), head.dtype),
        "bias": lambda: cast(sum_col(whole), head.bias or head.dtype),
    }
    return _plan([*dict.fromkeys([*inputs, x, weight])], {f"d_{n}": made[n]() for n in wanted})


def _plan(inputs: list[Node], outputs: dict[str, Node]) -> Plan:
    """The programs of outputs from those inputs that they read."""
    read = set(postorder(outputs.values()))
    return make_plan(Graph(tuple(n for n in inputs if n in read), tuple(outputs.items())))
