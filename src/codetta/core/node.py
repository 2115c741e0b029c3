"""One interned, immutable node for every value of the tensor graph: equality is identity."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from codetta.core.types import Type
from codetta.errors import SourceLine

Infer = Callable[[tuple["Node", ...], tuple[Hashable, ...]], Type]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A row of the op table: its name, its type rule, and the family it belongs to."""

    name: str
    infer: Infer
    family: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """``op`` applied to ``args``. Built by ``node`` only, so the same computation is the same object."""

    op: Op
    args: tuple[Node, ...]
    attrs: tuple[Hashable, ...]
    type: Type
    where: SourceLine | None

    def __repr__(self) -> str:
        attrs = f" {list(self.attrs)}" if self.attrs else ""
        return f"<{self.op}{attrs}: {self.type}>"


_POOL: weakref.WeakValueDictionary[Hashable, Node] = weakref.WeakValueDictionary()


def node(op: Op, *args: Node, attrs: tuple[Hashable, ...] = (), where: SourceLine | None = None) -> Node:
    """Build a node. An ill-typed node cannot exist: ``op.infer`` raises first."""
    # 1, 1.0 and True are equal in Python, as are 0.0 and -0.0, but they are different constants here; nan is one
    key = (op, args, tuple((type(a), repr(a) if isinstance(a, float) else a) for a in attrs))
    found = _POOL.get(key)
    if found is None:
        found = Node(op, args, attrs, op.infer(args, attrs), where)
        _POOL[key] = found
    return found


def postorder(roots: Iterable[Node], stop: Callable[[Node], bool] = lambda n: False) -> list[Node]:
    """What the roots depend on, arguments first, each once; the walk does not pass a node where ``stop`` is true."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack.append((root, iter(() if stop(root) else root.args)))
        while stack:
            current, rest = stack[-1]
            child = next((a for a in rest if a not in seen), None)
            if child is None:
                order.append(current)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(() if stop(child) else child.args)))
    return order


def users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For every node under the roots, the nodes that take it as an argument (once each)."""
    found: dict[Node, list[Node]] = {}
    for n in postorder(roots):
        found.setdefault(n, [])
        for a in dict.fromkeys(n.args):
            found[a].append(n)
    return found


def substitute(roots: Iterable[Node], mapping: dict[Node, Node]) -> list[Node]:
    """The roots with every mapped node replaced; the rest is rebuilt around it."""
    roots = list(roots)
    done: dict[Node, Node] = dict(mapping)
    for n in postorder(roots, stop=lambda m: m in mapping):
        if n not in done:
            args = tuple(done[a] for a in n.args)
            done[n] = n if args == n.args else node(n.op, *args, attrs=n.attrs, where=n.where)
    return [done[r] for r in roots]
