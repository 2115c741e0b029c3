"""codetta rewrites Transformer blocks as GEMM-plus-epilogue programs: ``torch.compile(model, backend="codetta")``."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codetta.audit.explain import explain as explain
    from codetta.audit.verify import verify as verify
    from codetta.capture.backend import backend as backend
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
    from codetta.lang.trace import epilogue as epilogue
    from codetta.lang.trace import finalize as finalize
    from codetta.lang.trace import leftover as leftover

__version__ = "0.1.0"

# Where each public name lives. A module is imported when one of its names is first used, so `import codetta` costs
# next to nothing. The imports above say the same to type checkers; tests/test_import.py compares the two.
_EXPORTS = {
    "codetta.audit.explain": ("explain",),
    "codetta.audit.verify": ("verify",),
    "codetta.capture.backend": ("backend",),
    "codetta.errors": (
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
    "codetta.lang.annotations": ("ColVec", "GroupVec", "RowVec", "Scalar", "Table", "Tile"),
    "codetta.lang.trace": ("epilogue", "finalize", "leftover"),
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
