"""What goes wrong in codetta, told in the user's words: the message, the line it is about, and the way out."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of somebody's source: where a value was made, or where a rule was broken."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.text.strip()}" if self.text.strip() else place


class CodettaError(Exception):
    """Anything that codetta refuses or fails at; catch this to catch them all."""

    def __init__(
        self, message: str, *, where: SourceLine | None = None, hint: str | None = None, write: str | None = None
    ) -> None:
        """``where`` is the line, ``hint`` the way out in words, ``write`` the code that should stand there."""
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        self.write = write

    def told(self, message: str, where: SourceLine | None) -> Self:
        """The same with other words and another line."""
        return type(self)(message, where=where, hint=self.hint, write=self.write)

    def __str__(self) -> str:
        lines = [self.message]
        if self.where is not None:
            lines.append(f"  at {self.where}")
        if self.hint is not None:
            lines.append(f"  hint: {self.hint}")
        if self.write is not None:
            first, *rest = self.write.splitlines()
            lines += [f"  write: {first}", *(f"         {line}" for line in rest)]
        return "\n".join(lines)


class ShapeError(CodettaError):
    """Sizes that do not fit together: inner sizes of a GEMM, a group that does not divide the columns."""


class TypeMismatch(CodettaError):
    """A dtype or a kind (Tile, RowVec, ColVec, ...) that an operation does not take."""


class BlockLocalError(CodettaError):
    """An epilogue that needs another tile of its own output, or a full reduction of it."""


class UnsupportedError(CodettaError):
    """What codetta cannot compile here (an op, a layout, a device); the hint says what to do instead."""


class CaptureError(CodettaError):
    """A graph handed over by ``torch.compile`` that breaks what capture relies on."""


class PlanError(CodettaError):
    """An inconsistency inside codetta, found by the verifier: a bug of ours, worth a report."""


class SettingsError(CodettaError):
    """An environment variable or an option with a value that means nothing."""


class AuthorError(CodettaError):
    """An epilogue file that cannot be checked: no program, no reference, a reference that does not fit."""


class VerifyError(CodettaError):
    """A result further from float64 than the accuracy bar allows."""
