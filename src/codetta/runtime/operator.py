"""``codetta.op``: an epilogue with its GEMM as one operator, under autograd, autocast and ``torch.compile``.

What a graph sees is ``codetta::program``, which names the program by its digest. It is composed of a segment, which has
kernels and a derived backward; the codetta backend takes it apart first, and plans the program with its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import count

import torch
from torch import Tensor

from codetta.backends.autocast import autocast_dtype
from codetta.backends.hopper.support import why_not
from codetta.backends.reference.evaluate import DTYPE_OF, TORCH
from codetta.core.node import Node, postorder
from codetta.core.types import AXES, ROWS, Dim, Kind, Type, tile
from codetta.errors import ShapeError, TypeMismatch, UnsupportedError
from codetta.ir import ops
from codetta.ir.build import cast, input_, matmul
from codetta.ir.graph import Graph
from codetta.ir.program import Program, param_name
from codetta.lang.sizes import learn_sizes, on_leaves
from codetta.lang.source import program_text
from codetta.lang.trace import Epilogue
from codetta.runtime import registry
from codetta.runtime.author import OPERANDS
from codetta.runtime.compile import Options
from codetta.runtime.library import LIBRARY

LIBRARY.define("program(Tensor x, Tensor weight, Tensor[] params, str digest) -> Tensor[]")
_PROGRAMS: dict[str, Program] = {}
_CALLS = count(1)


@dataclass(frozen=True)
class Operator:
    """``y = my_op(x, weight, **params)``: x @ weight.T with the epilogue behind it, differentiable by everything.

    ``x`` may have leading dimensions; Tiles, ColVecs, GroupVecs and Tables have the same ones, or broadcast to them.
    One output comes as a tensor, several as a dict. Reductions come whole. A Tile for which the epilogue names no dtype
    comes in that of ``x``, or of a wider Tile that went into it; numbers per row or column come in float32."""

    program: Program
    digest: str

    def __call__(self, x: Tensor, weight: Tensor, **params: Tensor | float) -> Tensor | dict[str, Tensor]:
        """Run it; ShapeError where a parameter is missing, unknown, or does not fit."""
        wanted = [(param_name(p), p.type) for p in self.program.params[1:]]
        if set(params) != {name for name, _ in wanted}:
            raise _misnamed(self.program.name, params, [name for name, _ in wanted])
        given = [torch.as_tensor(params[name], dtype=_number(params[name], t), device=x.device) for name, t in wanted]
        found = torch.ops.codetta.program(x, weight, given, self.digest)
        names = [name for name, _ in self.program.outputs]
        return found[0] if len(names) == 1 else dict(zip(names, found, strict=True))

    def __str__(self) -> str:
        return program_text(self.program)


def op(epilogue: Epilogue) -> Operator:
    """An epilogue as an operator: ``y = codetta.op(my_epilogue)(x, weight, **params)``."""
    program: Program | None = getattr(epilogue, "program", None)
    if program is None or program.role != "epilogue":
        what = f"a {program.role}" if program is not None else repr(epilogue)
        hint = "decorate the function with @epilogue; a @finalize or @leftover is called with .run(...)"
        raise UnsupportedError(f"codetta.op takes a program written with @epilogue, not {what}", hint=hint)
    if program.gemm is not None and program.gemm.form == "tn":
        raise UnsupportedError(f"{program.name} belongs to a weight gradient", hint="bind it to an nt or nn GEMM")
    digest = sha256(program_text(program).encode()).hexdigest()[:32]
    _PROGRAMS[digest] = program
    return Operator(program, digest)


def program_of(digest: str) -> Program:
    """The program that an operator of this process runs."""
    if digest not in _PROGRAMS:
        raise UnsupportedError(f"no operator {digest} in this process", hint="import the module with its codetta.op")
    return _PROGRAMS[digest]


def _misnamed(name: str, given: Mapping[str, object], wanted: Sequence[str]) -> ShapeError:
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    call = ", ".join(["x", "weight", *(f"{n}={n}" for n in wanted)])
    return ShapeError(f"{name}: missing {missing}, unknown {extra}", hint=f"call it as my_op({call})")


def _number(value: Tensor | float, t: Type) -> torch.dtype | None:
    """The dtype of a Python number; a tensor keeps its own."""
    return None if isinstance(value, Tensor) else TORCH[t.dtype]


# --- the operator -----------------------------------------------------------------------------------------------------


def _program(x: Tensor, weight: Tensor, params: Sequence[Tensor], digest: str) -> list[Tensor]:
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            return _program(_narrowed(x, dtype), _narrowed(weight, dtype), params, digest)
    program = program_of(digest)
    lead = x.shape[:-1]
    flat = [x.reshape(-1, x.shape[-1]), weight]
    flat += [_flat(param_name(p), p.type, t, lead) for p, t in zip(program.params[1:], params, strict=True)]
    graph = _graph(digest, *(_type_of(t, rows) for t, rows in zip(flat, _has_rows(program), strict=True)))
    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in flat)
    backend = "hopper" if x.is_cuda and why_not(x.device) is None else "reference"
    key = registry.register(graph, wanted, Options(backend))
    found = torch.ops.codetta.segment(flat, key, next(_CALLS))
    shapes = (n.type for _, n in graph.outputs)
    return [_unflat(t, of, lead) for t, of in zip(found, shapes, strict=False)]


def _narrowed(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t


def _has_rows(program: Program) -> list[bool]:
    return [True, False, *("m" in AXES[p.type.kind] for p in program.params[1:])]


def _flat(name: str, t: Type, value: Tensor, lead: Sequence[int]) -> Tensor:
    """A parameter with its leading dimensions as rows."""
    if value.dtype not in DTYPE_OF or DTYPE_OF[value.dtype].is_float != t.dtype.is_float:
        raise TypeMismatch(f"{name} is {t}, given a tensor of {value.dtype}")
    if "m" not in AXES[t.kind]:
        return value
    own = value.shape[-1:] if t.kind is not Kind.COLVEC else ()
    try:
        whole = value.expand(*lead, *own)
    except RuntimeError:
        shape = ", ".join(map(str, value.shape))
        message = f"{name} is {t}, given a tensor of shape ({shape}) beside an x with {tuple(lead)} in front"
        raise ShapeError(message, hint="its leading dimensions are those of x, or broadcast to them") from None
    return whole.reshape(-1, *own)


def _unflat(t: Tensor, of: Type, lead: Sequence[int]) -> Tensor:
    return t.reshape(*lead, *t.shape[1:]) if of.rows == ROWS else t


def _type_of(t: Tensor, rows: bool) -> Type:
    """The type of a flattened tensor; sizes but the rows are numbers."""
    sizes, dtype = [int(s) for s in t.shape[1 if rows else 0 :]], DTYPE_OF[t.dtype]
    if rows:
        return Type(Kind.TILE, dtype, ROWS, sizes[0]) if sizes else Type(Kind.COLVEC, dtype, ROWS)
    if len(sizes) == 2:
        return tile(sizes[1], dtype, rows=sizes[0])
    return Type(Kind.ROWVEC, dtype, None, sizes[0]) if sizes else Type(Kind.SCALAR, dtype)


@lru_cache(maxsize=1024)
def _graph(digest: str, x: Type, weight: Type, *given: Type) -> Graph:
    """The program behind its GEMM at the types of the tensors."""
    program = program_of(digest)
    names = [*OPERANDS, *map(param_name, program.params[1:])]
    kinds = [Kind.TILE, Kind.TILE, *(p.type.kind for p in program.params[1:])]
    types = [Type(kind, t.dtype, t.rows, t.cols) for kind, t in zip(kinds, (x, weight, *given), strict=True)]
    inputs = [input_(name, t) for name, t in zip(names, types, strict=True)]
    form = program.gemm.form if program.gemm is not None else "nt"
    outputs = behind(program, matmul(inputs[0], inputs[1], form), inputs[2:])
    taken = set(names)
    return Graph(tuple(inputs), tuple((_free(name, taken), n) for name, n in outputs))


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def behind(program: Program, product: Node, params: Sequence[Node]) -> list[tuple[str, Node]]:
    """The program's outputs over a GEMM's result and values for its other parameters, each as it is stored."""
    sizes: dict[str, Dim] = {}
    for p, n in zip(program.params, (product, *params), strict=True):
        learn_sizes(sizes, param_name(p), p.type, [d for d in (n.type.rows, n.type.cols) if d is not None])
    numbers = {name: size for name, size in sizes.items() if isinstance(size, int)}
    dtype = product.args[0].type.dtype
    return [(name, _stored(n, TORCH[dtype])) for name, n in on_leaves(program, [product, *params], numbers)]


def _stored(n: Node, dtype: torch.dtype) -> Node:
    if n.type.kind is not Kind.TILE or not n.type.dtype.is_float or n.op in (ops.CAST, ops.INPUT):
        return n
    for leaf in postorder([n], stop=lambda m: m.op is ops.MATMUL):
        if leaf.op is ops.INPUT and leaf.type.kind is Kind.TILE and leaf.type.dtype.is_float:
            dtype = torch.promote_types(dtype, TORCH[leaf.type.dtype])
    return cast(n, DTYPE_OF[dtype])


LIBRARY.impl("program", _program, "CompositeImplicitAutograd")
