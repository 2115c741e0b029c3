"""Finalizes, leftovers and steps on weights: one generated Triton kernel a program."""

from codetta.backends.hopper.rows.run import CompiledInfo, RowKernel, compile_rows

__all__ = ["CompiledInfo", "RowKernel", "compile_rows"]
