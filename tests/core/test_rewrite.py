"""The rewrite engine: a fixed point, nodes that stay, and rules that are wrong."""

import pytest

from codetta.core import rewrite as engine
from codetta.core.node import Node, postorder
from codetta.core.rewrite import Fired, Registry, Rule, rewrite
from codetta.core.types import bf16, tile
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.build import add, apply, cast, input_, mul, neg, sub

X, Y, Z = (input_(name, tile(4)) for name in "xyz")


def made(name: str, apply_rule) -> Rule:
    return Rule(name, apply_rule, lambda: X, name)


def _left(n: Node) -> Node | None:
    """a + (b + c) = (a + b) + c."""
    if n.op is ops.ADD and n.args[1].op is ops.ADD:
        return add(add(n.args[0], n.args[1].args[0]), n.args[1].args[1])
    return None


def _no_sub(n: Node) -> Node | None:
    """a - b = a + (-b)."""
    return add(n.args[0], neg(n.args[1])) if n.op is ops.SUB else None


LEFT, NO_SUB = made("left", _left), made("no_sub", _no_sub)


def test_rules_are_applied_until_none_fires():
    deep = add(X, add(Y, add(Z, sub(X, Y))))
    (found,) = rewrite([deep], [LEFT, NO_SUB])
    assert found is add(add(add(add(X, Y), Z), X), neg(Y))


def test_what_a_rule_makes_is_rewritten_too():
    """The new node's arguments are new: rules fire inside them before it is finished."""

    def once(n: Node) -> Node | None:
        return neg(sub(n.args[0], Y)) if n.op is ops.TANH else None

    assert rewrite([apply(ops.TANH, X)], [made("once", once), NO_SUB]) == [neg(add(X, neg(Y)))]


def test_shared_nodes_are_rewritten_once():
    deep = sub(X, Y)
    for _ in range(200):
        deep = add(deep, deep)
    record: list[Fired] = []
    (found,) = rewrite([deep], [NO_SUB], record=record)
    assert [(f.rule, f.before, f.after) for f in record] == [(NO_SUB, sub(X, Y), add(X, neg(Y)))]
    assert len(postorder([found])) == 204


def test_frozen_nodes_stay_as_they_are():
    kept = sub(X, Y)
    assert rewrite([mul(kept, sub(Y, X))], [NO_SUB], frozen=[kept]) == [mul(kept, add(Y, neg(X)))]
    assert rewrite([kept], [NO_SUB], frozen=[kept]) == [kept]


def test_a_rule_that_loops_is_reported(monkeypatch):
    monkeypatch.setattr(engine, "LIMIT", 50)

    def swap(n: Node) -> Node | None:
        return add(n.args[1], n.args[0]) if n.op is ops.ADD and n.args[0] is not n.args[1] else None

    with pytest.raises(PlanError, match="the rule swap never ends at <add"):
        rewrite([mul(add(X, Y), X)], [made("swap", swap)])


def test_a_rule_that_grows_for_ever_is_reported():
    def grow(n: Node) -> Node | None:
        return mul(neg(mul(n.args[0], 2.0)), 0.5) if n.op is ops.NEG else None

    with pytest.raises(PlanError, match="rules never end"):
        rewrite([neg(X)], [made("grow", grow)])


def test_types_must_not_change():
    def narrow(n: Node) -> Node | None:
        return cast(X, bf16) if n.op is ops.NEG else None

    with pytest.raises(PlanError, match=r"the rule narrow changed the type of .*f32\].* to Tile\[M, 4, bf16\]"):
        rewrite([neg(X)], [made("narrow", narrow)])


def test_the_first_rule_that_fires_wins():
    first = made("first", lambda n: X if n.op is ops.NEG else None)
    second = made("second", lambda n: Y if n.op is ops.NEG else None)
    record: list[Fired] = []
    assert rewrite([neg(Z)], [first, second], record=record) == [X]
    assert [f.rule.name for f in record] == ["first"]


def test_a_registry_keeps_rules_in_order_with_law_and_witness():
    registry = Registry()

    @registry.rule("-x = 0 - x", lambda: neg(X))
    def negate(n: Node) -> Node | None:
        return sub(0.0, n.args[0]) if n.op is ops.NEG else None

    (rule,) = registry
    assert (rule.law, rule.name, rule.example()) == ("-x = 0 - x", "negate", neg(X))
    assert rewrite([rule.example()], registry) == [sub(0.0, X)]
    assert negate(X) is None  # the function itself stays usable
