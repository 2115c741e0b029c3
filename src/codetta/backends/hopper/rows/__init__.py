"""Finalizes, leftovers and steps on weights: one generated Triton kernel a program."""

from codetta.backends.hopper.rows.bind import Bound, Spec
from codetta.backends.hopper.rows.run import CompiledInfo, RowKernel, compile_rows

__all__ = ["Bound", "CompiledInfo", "RowKernel", "Spec", "compile_rows"]
