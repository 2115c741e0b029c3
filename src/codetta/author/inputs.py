"""Random inputs of a program, and what its reference makes of them: values, and gradients by autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.author.bind import Draw
from codetta.author.file import Authored
from codetta.backends.reference.evaluate import TORCH
from codetta.core.types import ROWS, Kind, Type, boolean
from codetta.errors import AuthorError, CodettaError
from codetta.ir.program import Program, param_name
from codetta.lang.record import line_of_error
from codetta.partition.size import dim
from codetta.runtime.author import OPERANDS

Tensors = dict[str, Tensor]
ACC = "acc"


@dataclass(frozen=True)
class Given:
    """The inputs of one run by the parameters' names, and of an epilogue the operands behind ``acc``."""

    params: Tensors
    operands: Tensors

    @property
    def leaves(self) -> Tensors:
        """What gradients are taken by: the operands in the place of ``acc``."""
        return {**self.operands, **{n: t for n, t in self.params.items() if not (self.operands and n == ACC)}}


def draw_inputs(authored: Authored, program: Program, draw: Draw) -> Given:
    """Random inputs that the reference maps to finite numbers: of any sign, or else with positive vectors."""
    for positive in (False, True):
        given = _drawn(authored, program, draw, positive)
        found = reference_outputs(authored, given.params)
        if all(bool(t.isfinite().all()) for t in found.values() if t.is_floating_point()):
            return given
    bad = ", ".join(n for n, t in found.items() if t.is_floating_point() and not bool(t.isfinite().all()))
    hint = f"put random inputs in range: `def {authored.name}_inputs(inputs): return dict({_some(program)}=...)`"
    raise AuthorError(f"the reference gives no finite number for {bad} at {draw}", where=authored.where, hint=hint)


def _some(program: Program) -> str:
    return param_name(program.params[-1])


def _drawn(authored: Authored, program: Program, draw: Draw, positive: bool) -> Given:
    random = torch.Generator().manual_seed(1000 * draw.seed + 17)
    operands: Tensors = {}
    params = {param_name(p): _value(p.type, program, draw.rows, random, positive) for p in program.params}
    if program.role == "epilogue" and program.gemm is not None:
        acc, form = params[ACC], program.gemm.form
        (m, n), k = acc.shape, draw.inner
        x = torch.randn((k, m) if form == "tn" else (m, k), generator=random, dtype=torch.float64) * draw.scale
        w = torch.randn((n, k) if form == "nt" else (k, n), generator=random, dtype=torch.float64) * k**-0.5
        operands = dict(zip(OPERANDS, (x, w), strict=True))
        params[ACC] = product(form, x, w)
    return Given(_changed(authored, params), operands)


def product(form: str, x: Tensor, w: Tensor) -> Tensor:
    """The GEMM in front of an epilogue."""
    return x @ w.T if form == "nt" else x.T @ w if form == "tn" else x @ w


def _value(t: Type, program: Program, rows: int, random: torch.Generator, positive: bool) -> Tensor:
    shape = [dim(d, rows) for d in (t.rows, t.cols) if d is not None]
    if t.dtype is boolean:
        return torch.rand(shape, generator=random) < 0.5
    if not t.dtype.is_float:
        widest = max((p.type.cols for p in program.params if isinstance(p.type.cols, int)), default=8)
        cols = program.params[0].type.cols if program.role == "epilogue" else widest
        return torch.randint(0, cols if isinstance(cols, int) else widest, shape, generator=random).to(TORCH[t.dtype])
    found = torch.randn(shape, generator=random, dtype=torch.float64)
    vector = t.kind in (Kind.COLVEC, Kind.GROUPVEC, Kind.SCALAR)
    return found.abs() + 0.5 if positive and vector else found


def _changed(authored: Authored, params: Tensors) -> Tensors:
    """The inputs as the file's hook leaves them."""
    if authored.inputs is None:
        return params
    name = f"{authored.name}_inputs"
    try:
        found = authored.inputs({n: t.clone() for n, t in params.items()})
    except Exception as error:  # the author's own code: whatever it raises is told with its line
        raise _told(name, error, params) from error
    if not isinstance(found, Mapping) or not found.keys() <= params.keys():
        hint = f"return a dict of some of: {', '.join(params)}"
        raise AuthorError(f"{name} returns {_names(found)}", where=authored.where, hint=hint)
    if authored.program.role == "epilogue" and not torch.equal(found.get(ACC, params[ACC]), params[ACC]):
        hint = "acc is the result of a GEMM, whose operands are random; change the other inputs"
        raise AuthorError(f"{name} changes acc", where=authored.where, hint=hint)
    for n, t in found.items():
        if not isinstance(t, Tensor) or t.shape != params[n].shape:
            shape = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise AuthorError(f"{name}: {n} is {shape}, not {tuple(params[n].shape)}", where=authored.where)
    return {n: found.get(n, t).to(t.dtype) for n, t in params.items()}


def reference_outputs(authored: Authored, params: Mapping[str, Tensor]) -> Tensors:
    """What the reference returns, checked: the program's outputs by name, in their shapes."""
    name, outputs = f"{authored.name}_reference", dict(authored.program.outputs)
    try:
        found = authored.reference(**params)
    except CodettaError:
        raise
    except Exception as error:  # the author's own code, as above
        raise _told(name, error, params) from error
    found = {"out": found} if isinstance(found, Tensor) else found
    wanted = ", ".join(f"{n}=..." for n in outputs)
    if not isinstance(found, Mapping) or set(found) != set(outputs):
        message = f"{name} returns {_names(found)}, and {authored.name} stores {', '.join(outputs)}"
        raise AuthorError(message, where=authored.where, hint=f"end it with `return dict({wanted})`")
    for n, t in found.items():
        if not isinstance(t, Tensor):
            raise AuthorError(f"{name}: {n} is a {type(t).__name__}, no tensor", where=authored.where)
    return {n: found[n] for n in outputs}


def reference_gradients(
    authored: Authored,
    program: Program,
    given: Given,
    cotangents: Mapping[str, Tensor],
    following: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The gradients by autograd of everything that has one, zero where no output depends on it.

    ``following`` are, by output, the weights of a GEMM that takes it: there the cotangent is of that GEMM's result."""
    leaves = {n: t.clone().requires_grad_() for n, t in given.leaves.items() if t.is_floating_point()}
    weights = {n: t.clone().requires_grad_() for n, t in following.items()}
    params = {n: leaves.get(n, t) for n, t in given.params.items()}
    if given.operands and program.gemm is not None:
        params[ACC] = product(program.gemm.form, *(leaves[n] for n in OPERANDS))
    outputs = reference_outputs(authored, params)
    outputs = {n: t @ weights[n].T if n in weights else t for n, t in outputs.items()}
    roots = [(outputs[n], g) for n, g in cotangents.items() if outputs[n].requires_grad]
    sources = [*leaves.values(), *weights.values()]
    if not roots:
        found: tuple[Tensor | None, ...] = (None,) * len(sources)
    else:
        tensors, grads = zip(*roots, strict=True)
        found = torch.autograd.grad(tensors, sources, grads, allow_unused=True)
    whole = (torch.zeros_like(t) if g is None else g for t, g in zip(sources, found, strict=True))
    return dict(zip([*leaves, *weights], whole, strict=True))


def rows_of(program: Program, draw: Draw) -> int:
    """What M stands for."""
    return draw.rows if any(p.type.rows == ROWS for p in program.params) else 0


def _names(found: object) -> str:
    if isinstance(found, Mapping):
        return f"a dict of {', '.join(map(str, found)) or 'nothing'}"
    return "nothing" if found is None else f"a {type(found).__name__}"


def _told(name: str, error: Exception, params: Mapping[str, Tensor]) -> AuthorError:
    shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in params.items())
    where = line_of_error(error.__traceback__)
    return AuthorError(f"{name} fails: {error}", where=where, hint=f"it was given {shapes}")
