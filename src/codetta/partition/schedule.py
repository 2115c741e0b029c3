"""When each value of a graph is known: the order of its GEMMs, and the stage of every node."""

from __future__ import annotations

from dataclasses import dataclass, field

from codetta.core.node import Node, postorder
from codetta.core.types import AXES, Kind
from codetta.ir import legal, ops

# (i, s): i counts GEMMs from 1, 0 is before the first. s = 0: in registers in GEMM i's epilogue (or an input);
# s odd: in a finalize behind it; s even: in a leftover behind that.
Time = tuple[int, int]
START: Time = (0, 0)


@dataclass(slots=True)
class Schedule:
    """The GEMMs in order, and for each node its time; where a node had to leave its epilogue, why."""

    order: list[Node]
    time: dict[Node, Time]
    left: dict[Node, str] = field(default_factory=dict)
    epilogues: bool = True


def schedule(roots: list[Node], epilogues: bool = True) -> Schedule:
    """The schedule of everything under the roots; without ``epilogues`` all maps are made between the GEMMs."""
    nodes = postorder(roots)
    order = gemm_order(nodes)
    index = {n: i for i, n in enumerate(order, 1)}
    plan = Schedule(order, {}, {}, epilogues)
    homes: dict[Node, legal.Home] = {}
    for n in nodes:
        plan.time[n] = (index[n], 0) if n in index else _time(n, plan, homes)
        if n in index:
            homes[n] = legal.ACC
    return plan


def gemm_order(nodes: list[Node]) -> list[Node]:
    """Dependencies first; a weight gradient right behind the data gradient that it shares an operand with, so that
    both find what that one's epilogue stores, and its operands die early."""
    before: dict[Node, set[Node]] = {}
    for n in nodes:
        found = set().union(*(before[a] | ({a} if a.op is ops.MATMUL else set()) for a in n.args)) if n.args else set()
        before[n] = found
    waiting = [n for n in nodes if n.op is ops.MATMUL]
    order: list[Node] = []
    used: set[Node] = set()
    while waiting:
        ready = [n for n in waiting if before[n].isdisjoint(waiting)]
        data = [n for n in ready if n.attrs[0] != "tn"]
        shared = [n for n in ready if n.attrs[0] == "tn" and not used.isdisjoint(n.args)]
        picked = shared[0] if shared else data[0] if data else ready[0]
        order.append(picked)
        waiting.remove(picked)
        if picked.attrs[0] != "tn":
            used.update(picked.args)
    return order


def _time(n: Node, plan: Schedule, homes: dict[Node, legal.Home]) -> Time:
    if not n.args:
        return START
    latest = max(plan.time[a] for a in n.args)
    in_epilogue = latest[1] == 0 and latest[0] > 0
    if n.type.kind is not Kind.TILE:
        return _vector_time(n, plan, latest)
    if in_epilogue and not plan.epilogues:
        return latest if _is_plain(n) else (latest[0], 2)
    if in_epilogue:
        try:
            here = [homes.get(a) if plan.time[a] == latest else None for a in n.args]
            homes[n] = legal.home_of(n, here)
        except legal.CrossColumns as e:
            plan.left[n] = f"combines columns of different tiles: {e}"
            return latest[0], 2
        return latest
    if latest == START:
        return 0, 2
    return latest[0], latest[1] + latest[1] % 2


def _is_plain(n: Node) -> bool:
    """A column range of a GEMM's output, or it in the storage dtype: what any GEMM can store."""
    while n.op in (ops.CAST, ops.PART):
        n = n.args[0]
    return n.op is ops.MATMUL


def _vector_time(n: Node, plan: Schedule, latest: Time) -> Time:
    if n.op in (ops.REDUCE, ops.LSE, ops.SELECT):
        source = plan.time[n.args[0]]
        if n.args[0].type.kind is Kind.TILE:
            if source[1] == 0 and source[0] > 0 and plan.epilogues:
                return (source[0], 1) if legal.crosses("epilogue", n) else latest
            stage = max(latest, (source[0], max(2, source[1])))
            return (stage[0], stage[1] + 1) if legal.crosses("leftover", n) else stage
        loses_rows = "m" in AXES[n.args[0].type.kind] - AXES[n.type.kind]
        if loses_rows or n.type.kind is Kind.SCALAR:
            return latest[0], latest[1] | 1
        return latest
    if n.op is ops.TURN and latest != START:
        return latest[0], latest[1] | 1
    # a leftover has the rows, not the sums over them: such a vector waits for the finalize
    if (
        latest[1] >= 2
        and latest[1] % 2 == 0
        and any(plan.time[a] == latest and a.type.rows is None for a in n.args if a.args)
    ):
        return latest[0], latest[1] | 1
    return latest
