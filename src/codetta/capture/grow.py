"""Finds what of an ATen graph is understood, and to which stage between opaque calls each part belongs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.utils._pytree as pytree
from torch import fx

from codetta.capture.align import Value, check
from codetta.capture.aten import TABLE, activation_of, is_gemm, reason_for, translate
from codetta.capture.inplace import PINNED
from codetta.capture.layout import shape_of
from codetta.capture.scope import Border, Meaning, OpaqueArgument, Pair, Scope
from codetta.capture.sources import dtype_of
from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.errors import CodettaError, UnsupportedError
from codetta.ir.build import cast, input_

aten = torch.ops.aten

_COLUMNS = (Kind.ROWVEC, Kind.SCALAR)

NOT_NEAR_A_GEMM = "no GEMM needs it and it needs none"


@dataclass(slots=True)
class Growth:
    """What each FX node means, if it is understood, and why not, if it is not.

    An understood value of an earlier stage, and every opaque one, enters a stage as an INPUT across a border.
    ``reads`` are the arguments whose nodes a value contains, which makes them one segment; ``copies`` those that it
    computes again, being ``light``: vectors over columns, made of nothing but such vectors; ``enters`` are its borders.
    ``after`` keeps the order of operators that have effects."""

    meaning: dict[fx.Node, Meaning] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    copies: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    enters: dict[fx.Node, set[Border]] = field(default_factory=dict)
    light: set[fx.Node] = field(default_factory=set)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    behind_gemm: set[fx.Node] = field(default_factory=set)
    inputs: dict[Border, Node] = field(default_factory=dict)
    borders: dict[Node, Border] = field(default_factory=dict)
    after: dict[fx.Node, fx.Node] = field(default_factory=dict)
    differentiable: bool = False

    def wants_gradient(self, node: fx.Node) -> bool:
        """Whether a tensor takes part in a backward pass: it asks for a gradient and the graph keeps a history."""
        return self.differentiable and bool(node.meta["val"].requires_grad)


def grow(graph: fx.Graph) -> Growth:
    """The largest understood part of a graph in which every value belongs to some GEMM."""
    opaque, after = _never_understood(graph), _fixed_order(graph)
    calls = [n.meta.get("val") for n in graph.nodes if n.op == "call_function"]
    differentiable = any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves(calls))
    while True:
        growth = Growth(after=after, differentiable=differentiable)
        for node in graph.nodes:
            _visit(growth, node, opaque)
        refused = _homeless(graph, growth)
        if not refused:
            return growth
        opaque |= refused


def is_tensor(node: fx.Node) -> bool:
    """Whether an FX node is a tensor or several; sizes are not."""
    return any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(node.meta.get("val")))


def reads_size(node: fx.Node) -> bool:
    """Whether a node only asks for the size of a tensor, which is known without computing the tensor."""
    return node.target in (aten.sym_size.int, aten.sym_numel.default)


# --- one node ---------------------------------------------------------------------------------------------------------


def _visit(growth: Growth, node: fx.Node, opaque: dict[fx.Node, str]) -> None:
    if node in opaque or node.op != "call_function":
        growth.reasons[node] = opaque.get(node, "")
    else:
        for lent in _loans(growth, node):
            try:
                _understand(growth, node, lent)
            except OpaqueArgument as refusal:
                growth.reasons.setdefault(node, f"behind {refusal.name}")
            except CodettaError as refusal:
                growth.reasons.setdefault(node, refusal.message)
            else:
                growth.reasons.pop(node, None)
                return
    behind = [] if reads_size(node) else list(node.all_input_nodes)
    if node in growth.after:
        behind.append(growth.after[node])
    growth.stage[node] = max((growth.stage[a] + (a in growth.meaning) for a in behind), default=0)


def _loans(growth: Growth, node: fx.Node) -> list[frozenset[fx.Node]]:
    """Which arguments to read as tensors from outside, in the order to try: none, those that need no GEMM, all."""
    understood = [a for a in node.all_input_nodes if a in growth.meaning]
    stage = max((growth.stage[a] for a in understood), default=0)
    free = frozenset(a for a in understood if a not in growth.behind_gemm or growth.stage[a] < stage)
    tries = [frozenset[fx.Node](), free, *([frozenset(understood)] if is_gemm(node) else [])]
    return list(dict.fromkeys(tries))


def _understand(growth: Growth, node: fx.Node, lent: frozenset[fx.Node]) -> None:
    """Translate a node, the arguments in ``lent`` read as tensors from outside; raises where that cannot be done."""
    foreign = {a for a in node.all_input_nodes if a not in growth.light and not _same_region(a, node)}
    outside = {a for a in node.all_input_nodes if a in growth.meaning and (a in lent or a in foreign)}
    stage = max((growth.stage[a] + (a in outside) for a in node.all_input_nodes), default=0)
    around = _Around(growth, stage, lent, outside)
    scope = Scope(node, around)
    meaning = _item(scope) if _is_getitem(node) else _stored(node, translate(scope))
    growth.meaning[node], growth.stage[node] = meaning, stage
    growth.reads[node], growth.copies[node], growth.enters[node] = around.reads, around.copies, around.enters
    if scope.contracts or around.reads & growth.behind_gemm:
        growth.behind_gemm.add(node)
    elif around.reads <= growth.light and all(b.type.kind in _COLUMNS for b in around.enters):
        growth.light.add(node)


@dataclass(slots=True)
class _Around:
    """What an operator in translation sees of the values before it, and what it has looked at."""

    growth: Growth
    stage: int
    lent: frozenset[fx.Node]
    outside: set[fx.Node]
    reads: set[fx.Node] = field(default_factory=set)
    copies: set[fx.Node] = field(default_factory=set)
    enters: set[Border] = field(default_factory=set)

    def lookup(self, arg: fx.Node) -> Meaning | None:
        """What an argument means in this stage; an understood tensor of an earlier one keeps its layout."""
        found = self.growth.meaning.get(arg)
        if found is None or arg in self.lent:
            return None
        here = self.growth.stage[arg] == self.stage and arg not in self.outside
        if here or arg in self.growth.light:
            (self.reads if here else self.copies).add(arg)
            return found
        if not isinstance(found, Value):
            raise UnsupportedError(f"{arg.name} is not one tensor and belongs to an earlier segment")
        return Value(self.enter(Border(arg, found.node.type, found.dims)), found.dims)

    def understood(self, arg: fx.Node) -> bool:
        """Whether a node means anything, here or in an earlier stage."""
        return arg in self.growth.meaning

    def enter(self, border: Border) -> Node:
        """The INPUT node of a border."""
        self.enters.add(border)
        inputs = self.growth.inputs
        if border not in inputs:
            inputs[border] = input_(f"{border.source.name}/{len(inputs)}", border.type)
            self.growth.borders[inputs[border]] = border
        return inputs[border]


def _stored(node: fx.Node, meaning: Meaning) -> Meaning:
    """The meaning, rounded to the dtype that ATen stores, after a check that it lies where ATen's tensor does."""
    values = node.meta["val"]
    if isinstance(meaning, tuple):
        pairs = zip(meaning, values, strict=True)
        return tuple(_checked(v, t) for v, t in pairs)
    if isinstance(meaning, Pair):
        part = values.new_empty(values.shape, dtype=values.dtype.to_real())
        return Pair(_checked(meaning.real, part), _checked(meaning.imag, part))
    return _checked(meaning, values)


def _checked(value: Value, tensor: torch.Tensor) -> Value:
    check(value, shape_of(tensor))
    dtype = dtype_of(tensor)
    if dtype.is_float != value.node.type.dtype.is_float:
        raise UnsupportedError(f"{value.node} is stored as {dtype}")
    return replace(value, node=cast(value.node, dtype))


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


def _item(scope: Scope) -> Value:
    """One of several results."""
    source, index = scope.node.args
    found = scope.lookup(source) if isinstance(source, fx.Node) else None
    if not isinstance(found, tuple) or not isinstance(index, int):
        raise OpaqueArgument(source)
    return found[index]


def _same_region(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are recomputed together; a segment does not cross the border of a checkpointed region."""
    return bool(a.meta.get("ac_graph_id") == b.meta.get("ac_graph_id"))


# --- the whole graph --------------------------------------------------------------------------------------------------


def _never_understood(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that stay with PyTorch whatever their neighbours are, with the reasons."""
    known = [n for n in graph.nodes if n.op == "call_function" and (n.target in TABLE or _is_getitem(n))]
    members = frozenset(known)
    before: set[fx.Node] = set()
    for n in reversed(known):
        if any(u in before or (is_gemm(u) and activation_of(u) is n) for u in n.users if u in members):
            before.add(n)
    behind: set[fx.Node] = set()
    for n in known:
        if is_gemm(n) or any(a in behind for a in n.all_input_nodes):
            behind.add(n)
    thin: set[fx.Node] = set()
    for n in reversed(known):
        if _is_thin(n) and any(u in thin or u in before or u in behind for u in n.users):
            thin.add(n)
    found: dict[fx.Node, str] = {}
    for n in graph.nodes:
        if n.meta.get(PINNED):
            found[n] = "it touches memory that the graph changes in place"
        elif not is_tensor(n) and n.op == "call_function":
            found[n] = "it is no tensor"
        elif n.op == "call_function" and n.target not in TABLE and not _is_getitem(n):
            found[n] = reason_for(n.target)
        elif n not in before and n not in behind and n not in thin:
            found[n] = NOT_NEAR_A_GEMM
    return found


def _is_thin(node: fx.Node) -> bool:
    """Whether a node is a float vector or a number, such as a gain that one is added to."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() <= 1 and value.is_floating_point()


def _fixed_order(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node that draws random numbers or touches changing memory, the one that must run before it."""
    found: dict[fx.Node, fx.Node] = {}
    last: fx.Node | None = None
    for n in graph.nodes:
        tags = getattr(n.target, "tags", ())
        if n.op == "call_function" and (n.meta.get(PINNED) or torch.Tag.nondeterministic_seeded in tags):
            if last is not None:
                found[n] = last
            last = n
    return found


def _homeless(graph: fx.Graph, growth: Growth) -> dict[fx.Node, str]:
    """Understood values that no segment can take: of the first stage that has some."""
    feeds: set[fx.Node] = set()
    for n in reversed(graph.nodes):
        if n in growth.meaning:
            used = growth.reads[n] | growth.copies[n]
            feeds |= used if n in feeds or is_gemm(n) else used & growth.light if n in growth.behind_gemm else set()
    found = {n: NOT_NEAR_A_GEMM for n in growth.meaning if n not in feeds and n not in growth.behind_gemm}
    for n, meaning in growth.meaning.items():
        outer = [u for u in n.users if n not in growth.reads.get(u, ())]
        if isinstance(meaning, Pair) and outer:
            found[n] = f"{outer[0].name} needs it as a complex tensor"
    first = min((growth.stage[n] for n in found), default=0)
    return {n: why for n, why in found.items() if growth.stage[n] == first}
