"""Whether results are right, before anybody takes their time: against float64, from the very tensors that were read.

Two references: the step's own program, evaluated in float64, for what every output is; and, where a kind of program is
known by name, its plain expression, which shares nothing with the compiler and must be found among the outputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from codetta.audit.runs import poisoned_memory
from codetta.backends.reference.execute import compile_body
from codetta.backends.reference.tiles import fold
from codetta.bench.plain import KINDS
from codetta.bench.steps import Case, Memory
from codetta.core.types import ROWS
from codetta.errors import VerifyError
from codetta.ir import ops
from codetta.partition.plan import partial_outputs
from codetta.testing import relative_error

# One rounding to bfloat16 is an error of 1.7e-3, two are 2.4e-3; a term left out is off by more than 1e-2.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
ROWS_AT_ONCE = 4096
LIMIT = 1e-3  # of float32: statistics
PLAIN_LIMIT = 1e-2  # of others, who may round what lies between


def checked(case: Case, run: Callable[[], Memory], acc: Tensor | None) -> float:
    """The largest error of a step's outputs, given its GEMM's result in float64; VerifyError where one is off."""
    with poisoned():
        found = run()
    exact = _by_program(case, acc)
    folded = _folded(case, found)
    errors = {name: relative_error(folded[name], want) for name, want in exact.items()}
    for name, error in errors.items():
        limit = LIMITS.get(folded[name].dtype, LIMIT)
        if not error <= limit:
            raise VerifyError(f"{case.name}: {name} is {error:.2g} off its program in float64, {limit:.2g} is allowed")
    if case.role and acc is not None:
        _among(case, folded, plainly(case, acc))
    return max(errors.values())


def compared(
    name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = PLAIN_LIMIT
) -> float:
    """The largest error of a baseline's outputs, each of which must be expected; VerifyError where one is off."""
    worst = 0.0
    for key, t in found.items():
        error = relative_error(t, expected[key])
        if not error <= limit:
            raise VerifyError(f"{name}: {key} is {error:.2g} off float64, {limit:.2g} is allowed")
        worst = max(worst, error)
    return worst


def accumulator(case: Case) -> Tensor | None:
    """A GEMM's result in float64."""
    gemm = case.step.program.gemm
    if gemm is None:
        return None
    a = case.memory[case.step.a].double()
    b = torch.cat([case.memory[w] for w in case.step.b]).double()
    return a.t() @ b if gemm.form == "tn" else a @ (b.t() if gemm.form == "nt" else b)


def plainly(case: Case, acc: Tensor) -> Memory:
    """What the case's kind of program gives in float64."""
    return KINDS[case.role].stacked(acc, **{n: _double(t) for n, t in case.roles.items()})


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN; PyTorch's warnings that some operators have no deterministic form are of no interest."""
    with warnings.catch_warnings(), poisoned_memory(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def _double(t: Any) -> Any:
    return t.double() if isinstance(t, Tensor) and t.is_floating_point() else t


def _by_program(case: Case, acc: Tensor | None) -> Memory:
    """The program in float64; some rows at a time where rows have nothing to do with each other, nor with their number,
    to spare memory."""
    program, folds = case.step.program, case.plan.folds
    body = compile_body(program)
    loads = [] if acc is None else [acc]
    for name in case.step.loads:
        t = case.memory[name]
        loads.append(fold(folds[name], t.double()) if name in folds else t)
    if not all(n.type.rows == ROWS for _, n in program.outputs) or any(n.op is ops.ROW for n in program.body):
        return dict(_whole(case, body([_double(t) for t in loads], case.rows)))
    by_row = [p.type.rows == ROWS for p in program.params]
    found: dict[str, list[Tensor]] = {}
    for start in range(0, case.rows, ROWS_AT_ONCE):
        part = slice(start, min(start + ROWS_AT_ONCE, case.rows))
        some = [_double(t[part] if own else t) for t, own in zip(loads, by_row, strict=True)]
        for name, t in _whole(case, body(some, part.stop - start)):
            found.setdefault(name, []).append(t)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _folded(case: Case, found: Memory) -> Memory:
    return dict(_whole(case, [found[name] for name in case.step.stores]))


def _whole(case: Case, values: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    program = case.step.program
    for store, (_, n), parts, t in zip(
        case.step.stores, program.outputs, partial_outputs(program), values, strict=True
    ):
        yield store, fold(n, t) if parts else t


def _among(case: Case, folded: Memory, expected: Memory) -> None:
    """Each expected output is one of the step's, but for what the plan chose not to store: no tensor has its shape."""
    stored = 0
    for name, want in expected.items():
        alike = [t for t in folded.values() if t.shape == want.shape]
        stored += bool(alike)
        if alike and not min(relative_error(t, want) for t in alike) <= PLAIN_LIMIT:
            raise VerifyError(f"{case.name}: none of its outputs is {name} as plain PyTorch has it in float64")
    if not stored:
        raise VerifyError(f"{case.name}: it stores nothing of {', '.join(expected)}")
