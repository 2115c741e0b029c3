"""codetta rewrites Transformer blocks as GEMM-plus-epilogue programs: ``torch.compile(model, backend="codetta")``."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codetta.audit.explain import explain as explain
    from codetta.audit.verify import verify as verify
    from codetta.capture.backend import backend as backend
    from codetta.capture.trainer import register_with_accelerate as register_with_accelerate
    from codetta.core.types import bf16 as bf16
    from codetta.core.types import boolean as boolean
    from codetta.core.types import f16 as f16
    from codetta.core.types import f32 as f32
    from codetta.core.types import f64 as f64
    from codetta.core.types import i32 as i32
    from codetta.core.types import i64 as i64
    from codetta.errors import AuthorError as AuthorError
    from codetta.errors import BlockLocalError as BlockLocalError
    from codetta.errors import CaptureError as CaptureError
    from codetta.errors import CodettaError as CodettaError
    from codetta.errors import PlanError as PlanError
    from codetta.errors import SettingsError as SettingsError
    from codetta.errors import ShapeError as ShapeError
    from codetta.errors import TypeMismatch as TypeMismatch
    from codetta.errors import UnsupportedError as UnsupportedError
    from codetta.errors import VerifyError as VerifyError
    from codetta.lang.annotations import ColVec as ColVec
    from codetta.lang.annotations import GroupVec as GroupVec
    from codetta.lang.annotations import RowVec as RowVec
    from codetta.lang.annotations import Scalar as Scalar
    from codetta.lang.annotations import Table as Table
    from codetta.lang.annotations import Tile as Tile
    from codetta.lang.annotations import Value as Value
    from codetta.lang.sizes import with_sizes as with_sizes
    from codetta.lang.source import parse_program as parse_program
    from codetta.lang.source import program_text as program_text
    from codetta.lang.trace import Epilogue as Epilogue
    from codetta.lang.trace import epilogue as epilogue
    from codetta.lang.trace import finalize as finalize
    from codetta.lang.trace import leftover as leftover
    from codetta.nn.linear_cross_entropy import LossMetrics as LossMetrics
    from codetta.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from codetta.runtime.operator import Operator as Operator
    from codetta.runtime.operator import op as op
    from codetta.runtime.pack import pack_ as pack_

    # fmt: off
    # isort: off
    from codetta.lang.functions import (
        abs as abs, absmax_all as absmax_all, absmax_col as absmax_col, absmax_groups as absmax_groups,
        absmax_inside as absmax_inside, absmax_row as absmax_row, add as add, adjacent as adjacent,
        column_index as column_index, columns as columns, const as const, cos as cos, div as div, eq as eq,
        equal_columns as equal_columns, erf as erf, exp as exp, expand as expand, floordiv as floordiv, ge as ge,
        gelu as gelu, gelu_tanh as gelu_tanh, gt as gt, halves as halves, join_adjacent as join_adjacent,
        join_columns as join_columns, join_halves as join_halves, le as le, log as log, logical_and as logical_and,
        logical_not as logical_not, logical_or as logical_or, logsumexp_row as logsumexp_row, lt as lt,
        max_all as max_all, max_col as max_col, max_groups as max_groups, max_inside as max_inside, max_row as max_row,
        maximum as maximum, minimum as minimum, mod as mod, mul as mul, ne as ne, neg as neg, random as random,
        recip as recip, row_index as row_index, rsqrt as rsqrt, select_column as select_column, sigmoid as sigmoid,
        silu as silu, sin as sin, sqrt as sqrt, stack as stack, sub as sub, sum_all as sum_all, sum_col as sum_col,
        sum_groups as sum_groups, sum_inside as sum_inside, sum_row as sum_row, take_rows as take_rows, tanh as tanh,
        to as to, turn as turn, where as where,
    )
    # isort: on
    # fmt: on

__version__ = "0.1.0"

# fmt: off
_LANGUAGE = (
    "abs", "absmax_all", "absmax_col", "absmax_groups", "absmax_inside", "absmax_row", "add", "adjacent",
    "column_index", "columns", "const", "cos", "div", "eq", "equal_columns", "erf", "exp", "expand", "floordiv", "ge",
    "gelu", "gelu_tanh", "gt", "halves", "join_adjacent", "join_columns", "join_halves", "le", "log", "logical_and",
    "logical_not", "logical_or", "logsumexp_row", "lt", "max_all", "max_col", "max_groups", "max_inside", "max_row",
    "maximum", "minimum", "mod", "mul", "ne", "neg", "random", "recip", "row_index", "rsqrt", "select_column",
    "sigmoid", "silu", "sin", "sqrt", "stack", "sub", "sum_all", "sum_col", "sum_groups", "sum_inside", "sum_row",
    "take_rows", "tanh", "to", "turn", "where",
)
# fmt: on

# Where each public name lives. A module is imported when one of its names is first used, so `import codetta` costs
# next to nothing. The imports above say the same to type checkers; tests/test_import.py compares the two.
_EXPORTS = {
    "codetta.audit.explain": ("explain",),
    "codetta.audit.verify": ("verify",),
    "codetta.capture.backend": ("backend",),
    "codetta.capture.trainer": ("register_with_accelerate",),
    "codetta.core.types": ("bf16", "boolean", "f16", "f32", "f64", "i32", "i64"),
    "codetta.errors": (
        "AuthorError",
        "BlockLocalError",
        "CaptureError",
        "CodettaError",
        "PlanError",
        "SettingsError",
        "ShapeError",
        "TypeMismatch",
        "UnsupportedError",
        "VerifyError",
    ),
    "codetta.lang.annotations": ("ColVec", "GroupVec", "RowVec", "Scalar", "Table", "Tile", "Value"),
    "codetta.lang.functions": _LANGUAGE,
    "codetta.lang.sizes": ("with_sizes",),
    "codetta.lang.source": ("parse_program", "program_text"),
    "codetta.lang.trace": ("Epilogue", "epilogue", "finalize", "leftover"),
    "codetta.nn.linear_cross_entropy": ("LossMetrics", "linear_cross_entropy"),
    "codetta.runtime.operator": ("Operator", "op"),
    "codetta.runtime.pack": ("pack_",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = list(_HOME)

if not TYPE_CHECKING:  # a checker that sees `__getattr__` would accept any misspelt name

    def __getattr__(name: str) -> object:
        """The public object called ``name``, imported on first use."""
        if name not in _HOME:
            raise AttributeError(f"module 'codetta' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
