"""Rules as data, and the engine that applies them to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from codetta.core.node import Node, node, postorder
from codetta.errors import PlanError

Match = Callable[[Node], Node | None]
LIMIT = 10_000  # rule applications at one place; rules go one way, so only a wrong rule comes near


@dataclass(frozen=True, slots=True)
class Rule:
    """A law that holds in exact arithmetic, the function that applies it at a node, and a graph on which it fires."""

    law: str
    apply: Match
    example: Callable[[], Node]
    name: str


@dataclass(frozen=True, slots=True)
class Fired:
    """One application of a rule."""

    rule: Rule
    before: Node
    after: Node


class Registry(list[Rule]):
    """The rules of one file, in order of their definition."""

    def rule(self, law: str, example: Callable[[], Node]) -> Callable[[Match], Match]:
        """Register the decorated function under its law, with a witness on which it fires."""

        def register(fn: Match) -> Match:
            self.append(Rule(law, fn, example, fn.__name__))
            return fn

        return register


def rewrite(
    roots: Iterable[Node], rules: Sequence[Rule], frozen: Collection[Node] = (), record: list[Fired] | None = None
) -> list[Node]:
    """The roots with every rule applied until none fires. Nodes of ``frozen`` stay as they are. Types never change."""
    roots = list(roots)
    done: dict[Node, Node] = {n: n for n in frozen}
    try:
        _normalise(roots, rules, done, record)
    except RecursionError as e:
        raise PlanError(f"rules never end: among {len(rules)}, one makes what it or another takes up again") from e
    return [done[r] for r in roots]


def _normalise(roots: list[Node], rules: Sequence[Rule], done: dict[Node, Node], record: list[Fired] | None) -> None:
    for n in postorder(roots, stop=lambda m: m in done):
        if n in done:
            continue
        args = tuple(done[a] for a in n.args)
        current = n if args == n.args else node(n.op, *args, attrs=n.attrs, where=n.where)
        seen = 0
        while (fired := _first(current, rules)) is not None:
            seen += 1
            if seen > LIMIT:
                raise PlanError(f"the rule {fired[0].name} never ends at {n}")
            rule, after = fired
            if after.type != current.type:
                raise PlanError(f"the rule {rule.name} changed the type of {current} to {after.type}")
            if record is not None:
                record.append(Fired(rule, current, after))
            _normalise(list(after.args), rules, done, record)
            args = tuple(done[a] for a in after.args)
            current = after if args == after.args else node(after.op, *args, attrs=after.attrs, where=after.where)
            if current in done:
                current = done[current]
                break
        done[n] = current
        done.setdefault(current, current)


def _first(n: Node, rules: Sequence[Rule]) -> tuple[Rule, Node] | None:
    for rule in rules:
        after = rule.apply(n)
        if after is not None and after is not n:
            return rule, after
    return None
