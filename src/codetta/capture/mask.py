"""Proves what an attention mask says, and hands causal attention to PyTorch as such.

transformers builds a mask tensor whenever it is traced, and repeats keys and values because there is one. Proven
causal, the call becomes ``is_causal=True, enable_gqa=True`` on the keys and values themselves.

Packed documents and windows shorter than the text are proven too. scaled_dot_product_attention has a causal path alone,
so where Inductor compiles for a GPU the call becomes one of ``block_attention``. Elsewhere it keeps its mask, and the
reason is told. What needs no mask, or a window alone, is FlashAttention's where that is installed (``flash``).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.fx.node import map_arg

from codetta.capture import flash
from codetta.capture.block_attention import (
    ORDERS,
    block_attention,
    block_lists,
    why_not,
    why_not_on,
)
from codetta.capture.cacheable import cacheable
from codetta.capture.element_rules import RULES
from codetta.capture.elements import (
    ZERO,
    All,
    Axis,
    Bias,
    Holds,
    Index,
    Linear,
    Load,
    Reader,
    combine,
    linear,
    shape_of,
)
from codetta.capture.inplace import PINNED
from codetta.capture.normalise import placeholder_name
from codetta.capture.peel import same_layout
from codetta.nn.attention import flash_attention

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default

# Flash attention on CUDA takes grouped heads only up to this head size.
MAX_GROUPED_HEAD = 256


@dataclass(frozen=True, slots=True)
class Facts:
    """What a mask lets through: all of these at once. Nothing set means that it hides nothing."""

    causal: bool = False
    window: int | None = None
    documents: tuple[Node, ...] = ()
    padding: tuple[Node, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def all_true(self) -> bool:
        """Whether the mask hides nothing."""
        return self == Facts()

    @property
    def in_blocks(self) -> bool:
        """Whether the mask is exactly causal within a window or within documents, or within both."""
        bounded = self.window is not None or bool(self.documents)
        return self.causal and bounded and not self.padding and not self.unknown

    def __str__(self) -> str:
        words = ["causal"] if self.causal else []
        words += [f"window {self.window}"] if self.window is not None else []
        words += [f"same document ({placeholder_name(n)})" for n in self.documents]
        words += [f"key padding ({placeholder_name(n)})" for n in self.padding]
        words += [f"unknown ({text})" for text in self.unknown]
        return " + ".join(words) or "all true"


def prove(node: Node) -> Facts:
    """What the mask ``node``, broadcast over (..., queries, keys), certainly lets through, for all sizes."""
    shape = shape_of(node)
    if len(shape) < 2:
        return Facts(unknown=(f"a mask of {len(shape)} axes",))
    if _touches_mutated_memory(node):
        return Facts(unknown=("made from memory that is written to",))
    axes = [linear(Axis(i)) for i in range(len(shape))]
    index = tuple(ZERO if statically_known_true(n == 1) else axis for n, axis in zip(shape, axes, strict=True))
    value = Reader(RULES).element(node, index)
    if isinstance(value, Bias):
        value = value.allowed
    if not isinstance(value, All):
        return Facts(unknown=(f"computed by {node.target}",))
    return _facts(value, index)


@dataclass(slots=True)
class _Proofs:
    """What is known of the masks of one graph, the block lists that calls with the same mask share, who compiles the
    graph, and whether FlashAttention may serve it."""

    inner: str
    flash: bool
    facts: dict[Node, Facts] = field(default_factory=dict)
    lists: dict[Node, Node] = field(default_factory=dict)


def make_attention_causal(gm: GraphModule, inner: str = "eager", flash: bool = False) -> list[str]:
    """Rewrite the attention calls of a normalised graph where a proof allows it; one line a call says what was done.

    ``inner`` compiles the graph afterwards: block attention needs "inductor". ``flash``: FlashAttention may serve."""
    proofs = _Proofs(inner, flash)
    calls = gm.graph.find_nodes(op="call_function", target=SDPA)
    lines = [f"{_place(node)}: {_rewrite(node, proofs)}{_by_flash(node, proofs)}" for node in calls]
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return lines


def _facts(value: All, index: Index) -> Facts:
    """The conjuncts of a mask, by name."""
    query, key, batch = index[-2], index[-1], index[0] if len(index) == 4 else ZERO
    causal, window, documents, padding, unknown = False, None, [], [], []
    for conjunct in sorted(value.conjuncts, key=str):
        match conjunct:
            case Holds(value=v, relation="<=") if v == combine(key, query, -1) and key.terms and query.terms:
                causal = True
            case Holds(value=v, relation="<=") if (width := _window(v, query, key)) is not None:
                window = width if window is None else min(width, window)
            case Holds(value=v, relation="==") if (table := _document_table(v, query, key, batch)) is not None:
                documents.append(table)
            case Load(node=table, index=where) if where and where[-1] == key and query not in where:
                padding.append(table)
            case _:
                unknown.append(_spell(conjunct))
    return Facts(causal, window, tuple(documents), tuple(padding), tuple(unknown))


def _window(value: Linear, query: Linear, key: Linear) -> int | None:
    """``W`` if ``value <= 0`` says ``key > query - W``."""
    rest = combine(value, combine(query, key, -1), -1)
    return 1 - rest.constant if not rest.terms and query.terms and key.terms and rest.constant <= 0 else None


def _document_table(value: Linear, query: Linear, key: Linear, batch: Linear) -> Node | None:
    """``T`` if ``value == 0`` says ``T[query] == T[key]``, for the ``T`` of the batch or one that all share."""
    match sorted(value.terms, key=lambda term: term[1]):
        case [(Load(node=a, index=i), -1), (Load(node=b, index=j), 1)] if a is b and i[:-1] == j[:-1]:
            shared = i[:-1] in ((), (ZERO,)) and all(statically_known_true(n == 1) for n in shape_of(a)[:-1])
            own = bool(batch.terms) and i[:-1] == (batch,)
            exact = value.constant == 0 and {i[-1], j[-1]} == {query, key}
            return a if exact and (shared or own) else None
    return None


def _rewrite(node: Node, proofs: _Proofs) -> str:
    """Rewrite one attention call, and say what was proven or why it was left alone."""
    if len(node.args) < 3:
        return "left alone: it names its arguments"
    mask, causal = _argument(node, 3, "attn_mask"), bool(_argument(node, 5, "is_causal", False))
    said = "is_causal" if causal else "no mask"
    if isinstance(mask, Node):
        facts = proofs.facts[mask] = proofs.facts.get(mask) or prove(mask)
        said = str(facts)
        reason = _why_not(node, mask, facts)
        if reason is not None and facts.in_blocks and not mask.meta["val"].requires_grad:
            return f"{said}; {_in_blocks(node, mask, reason, proofs)}"
        if reason is not None:
            return f"{said}; left alone: {reason}"
        causal = facts.causal
    plain = _unrepeated(node)
    if plain is None and not isinstance(mask, Node):
        return f"{said}; left alone: nothing to gain"
    reason = _replace(node, plain, causal)
    if reason is not None:
        return f"{said}; left alone: {reason}"
    done = ["is_causal=True"] * causal + ["no mask"] * (not causal) + ["enable_gqa=True"] * (plain is not None)
    return f"{said}; now {', '.join(done)}"


def _why_not(node: Node, mask: Node, proven: Facts) -> str | None:
    """The reason why a mask cannot be replaced, or ``None``."""
    if mask.meta["val"].requires_grad:
        return "the mask has a gradient"
    if proven.all_true:
        return None
    if not proven.causal or proven.unknown:
        return "it is not exactly causal"
    if proven.documents or proven.padding:
        what = "documents" if proven.documents else "padding"
        return f"attention's causal path knows no {what}"
    queries, keys = (shape_of(n)[-2] for n in node.args[:2] if isinstance(n, Node))
    if not guard_or_false(queries == keys):
        return f"{queries} queries and {keys} keys"
    if proven.window is not None and not guard_or_false(keys <= proven.window):
        return f"{keys} keys and a window of {proven.window}"
    return None


def _in_blocks(node: Node, mask: Node, reason: str, proofs: _Proofs) -> str:
    """Make a call one of ``block_attention`` if it can be; what was done, or beside ``reason`` why it was not."""
    facts, plain = proofs.facts[mask], _unrepeated(node)
    grouped = ", enable_gqa=True" * (plain is not None)
    heads: Any = (node.args[0], *(plain or node.args[1:3]))
    if proofs.flash and not facts.documents and _flash_instead(node, heads, facts.causal, facts.window) is None:
        return f"now FlashAttention{grouped}"
    given: Any = heads, facts.documents
    live, tables = map_arg(given, lambda n: n.meta["val"])
    dropout, scale = _argument(node, 4, "dropout_p", 0.0), node.kwargs.get("scale")
    why = why_not_on(live[0].device, proofs.inner) or why_not(live, tables, dropout, scale)
    if why is not None:
        return f"left alone: {reason}, and {why}"
    if mask not in proofs.lists:
        proofs.lists[mask] = _lists_before(node, heads[0], facts)
    for order in ORDERS:
        args = heads, proofs.lists[mask], facts.documents, facts.window, scale, order
        if _call_instead(node, block_attention, args, {}) is None:
            node.meta.update(cacheable())
            return f"now block attention (flex){grouped}"
    return f"left alone: {reason}, and block attention would lay out its result differently"


def _by_flash(node: Node, proofs: _Proofs) -> str:
    """Make a call that has no mask one of FlashAttention if it can be; what was done, or why it was not."""
    if not proofs.flash or node.target is not SDPA or _argument(node, 3, "attn_mask") is not None:
        return ""
    reason = _flash_instead(node, node.args[:3], bool(_argument(node, 5, "is_causal", False)), None)
    return "; by FlashAttention" if reason is None else f"; not by FlashAttention: {reason}"


def _flash_instead(node: Node, heads: Any, causal: bool, window: int | None) -> str | None:
    """Make ``node`` a call of FlashAttention; the reason why not."""
    scale = node.kwargs.get("scale")
    live = map_arg(heads, lambda n: n.meta["val"])
    reason = flash.why_not(live, _argument(node, 4, "dropout_p", 0.0), scale, causal)
    options = {"causal": causal, "window": window, "scale": scale}
    reason = reason or _call_instead(node, flash_attention, tuple(heads), options)
    if reason is None:
        node.meta.update(cacheable())
    return reason


def _lists_before(node: Node, query: Any, facts: Facts) -> Node:
    """A node before ``node`` that computes the block lists of a mask."""
    args: Any = (query, facts.documents, facts.window)
    with node.graph.inserting_before(node):
        lists = node.graph.call_function(block_lists, args)
    live = map_arg(args, lambda n: n.meta["val"])
    with _fake_mode(live[0]):
        lists.meta["val"] = block_lists(*live)
    lists.meta.update(cacheable())
    return lists


def _replace(node: Node, plain: tuple[Node, Node] | None, causal: bool) -> str | None:
    """Call ``node`` without a mask; the reason why not, if its result would be laid out differently."""
    query, key, value = node.args[:3]
    args = (query, *(plain or (key, value)), None, _argument(node, 4, "dropout_p", 0.0), causal)
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    if plain is not None:
        kwargs["enable_gqa"] = True
    return _call_instead(node, SDPA, args, kwargs)


def _call_instead(node: Node, target: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str | None:
    """Make ``node`` another call; the reason why not, if its result would be laid out differently."""
    before: Tensor = node.meta["val"]
    live_args, live_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    # inside of the fake mode: on some devices (meta) the causal path makes the mask itself
    with _fake_mode(before):
        after = target(*live_args, **live_kwargs)
    if not same_layout(before, after):
        return f"its result would have strides {tuple(after.stride())} instead of {tuple(before.stride())}"
    node.target, node.args, node.kwargs = target, args, kwargs
    return None


def _fake_mode(value: Any) -> AbstractContextManager[Any]:
    return value.fake_mode if isinstance(value, FakeTensor) else nullcontext()


def _unrepeated(node: Node) -> tuple[Node, Node] | None:
    """Keys and values before their heads were repeated, if both were, and alike."""
    if _argument(node, 7, "enable_gqa", False):
        return None
    query, key, value = (n for n in node.args[:3] if isinstance(n, Node))
    sources = [_repeat_source(n) for n in (key, value)]
    plain_key, plain_value = sources
    if plain_key is None or plain_value is None:
        return None
    sizes = shape_of(key)[-1], shape_of(value)[-1]
    limit = query.meta["val"].device.type == "cuda" and not (sizes[0] == sizes[1] and sizes[0] <= MAX_GROUPED_HEAD)
    same = statically_known_true(shape_of(plain_key)[1] == shape_of(plain_value)[1])
    return (plain_key, plain_value) if same and not limit else None


def _repeat_source(node: Node) -> Node | None:
    """``x`` if ``node`` is ``x`` (batch, heads, length, size) with each head repeated in place."""
    if node.target is aten.repeat_interleave.self_int and _argument(node, 2, "dim") in (1, -3):
        source = node.args[0]
        return source if isinstance(source, Node) and isinstance(node.args[1], int) else None
    expanded = node.args[0] if node.target in (aten.reshape.default, aten.view.default) else None
    lifted = expanded.args[0] if isinstance(expanded, Node) and expanded.target is aten.expand.default else None
    if not isinstance(expanded, Node) or not isinstance(lifted, Node):
        return None
    if lifted.target is not aten.unsqueeze.default or lifted.args[1] not in (2, -3):
        return None
    source = lifted.args[0]
    if not isinstance(source, Node) or len(shape_of(source)) != 4 or len(shape_of(node)) != 4:
        return None
    batch, heads, length, size = shape_of(source)
    copies = shape_of(expanded)[2]
    fits = shape_of(expanded) == (batch, heads, copies, length, size) and shape_of(node)[1] == heads * copies
    return source if fits and shape_of(node) == (batch, heads * copies, length, size) else None


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _touches_mutated_memory(node: Node) -> bool:
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current.meta.get(PINNED):
            return True
        if current not in seen:
            seen.add(current)
            stack += current.all_input_nodes
    return False


def _place(node: Node) -> str:
    """The module that an attention call belongs to, or the name of its node."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[-1].removeprefix("L['self'].") if stack else node.name


def _spell(conjunct: Holds | Load) -> str:
    """A conjunct in words that name no axis of ours: the axes are a0, a1, ..."""

    def atom(a: Axis | Load) -> str:
        return f"a{a.number}" if isinstance(a, Axis) else load(a)

    def load(x: Load) -> str:
        return f"{placeholder_name(x.node)}[{', '.join(integer(i) for i in x.index)}]"

    def integer(x: Linear) -> str:
        words = [f"{'' if c == 1 else '-' if c == -1 else f'{c}*'}{atom(a)}" for a, c in x.terms]
        return " + ".join([*sorted(words), *([str(x.constant)] if x.constant or not words else [])])

    return load(conjunct) if isinstance(conjunct, Load) else f"{integer(conjunct.value)} {conjunct.relation} 0"
