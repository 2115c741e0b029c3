"""The file that ``codetta new`` writes."""

from __future__ import annotations

import keyword
from pathlib import Path

from codetta.errors import AuthorError
from codetta.lang.functions import LANGUAGE

TEXT = '''"""What follows a GEMM: a bias, an activation, a residual. Check it with: codetta check {name}.py"""

import torch.nn.functional as F

from codetta import RowVec, Tile, epilogue, silu


# `acc` is the GEMM's result, x @ w.T, one tile at a time, while it is still in registers.
#   Tile      rows x columns, as acc        RowVec  one number per column: a bias, a gain
#   ColVec    one number per row            Scalar  one number
# Use operators and the functions of docs/language.md. A sum over a whole row (sum_row) may be stored, but not used
# here: other tiles hold the rest of the row. What is returned is stored, under its name.
@epilogue
def {name}(acc: Tile, bias: RowVec, residual: Tile):
    y = silu(acc + bias) + residual
    return dict(y=y)


# The same in plain PyTorch: same parameters, same names out. `codetta check` compares with it in float64, at random
# sizes: values, and by autograd the gradients of the backward programs, which are derived.
def {name}_reference(acc, bias, residual):
    y = F.silu(acc + bias) + residual
    return dict(y=y)


# The sizes at which the kernels are compiled and timed: M rows, N columns, inner size K.
{name}_SIZES = {{"M": 16384, "N": 4096, "K": 4096}}
'''


def write_new(name: str, folder: Path) -> Path:
    """``NAME.py`` in a folder; AuthorError where the name is none, or the file exists."""
    if not name.isidentifier() or keyword.iskeyword(name) or name in LANGUAGE:
        reason = "is a function of the language" if name in LANGUAGE else "is no name for a Python function"
        raise AuthorError(f"{name!r} {reason}", hint="as in `codetta new my_epilogue`: letters, digits, underscores")
    file = folder / f"{name}.py"
    if not folder.is_dir():
        raise AuthorError(f"no folder {folder}", hint=f"`mkdir -p {folder}` first")
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(TEXT.format(name=name))
    except FileExistsError:
        raise AuthorError(f"{file} exists and is left alone", hint="choose another name, or another --folder") from None
    return file
