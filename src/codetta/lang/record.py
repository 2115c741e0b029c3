"""What is remembered while a function is traced: which of the user's lines made a node, and which variable held it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType, TracebackType

from codetta.core.node import Node
from codetta.errors import SourceLine

# The files of the language itself, which no error should point at; ready epilogues are written as users write theirs.
_OURS = {
    f"codetta.lang.{name}" for name in ("annotations", "body", "functions", "record", "signature", "source", "trace")
}


@dataclass(frozen=True, slots=True)
class Record:
    """One trace. Nodes are interned and remember who made them first; an error must name this trace's line."""

    lines: dict[Node, SourceLine] = field(default_factory=dict)
    names: dict[Node, str] = field(default_factory=dict)


_ACTIVE: ContextVar[Record | None] = ContextVar("active trace", default=None)


def active() -> Record | None:
    """The trace under way, if any."""
    return _ACTIVE.get()


@contextmanager
def recording() -> Iterator[Record]:
    """A new trace, active inside the block."""
    token = _ACTIVE.set(Record())
    try:
        yield _ACTIVE.get() or Record()
    finally:
        _ACTIVE.reset(token)


def user_frame() -> FrameType:
    """The innermost frame that is not the language's own."""
    frame = sys._getframe(1)
    while _is_ours(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def user_line(frame: FrameType | None = None) -> SourceLine:
    """The line being executed in the user's code."""
    frame = frame or user_frame()
    return source_line(frame.f_code.co_filename, frame.f_lineno)


def line_of_error(traceback: TracebackType | None) -> SourceLine | None:
    """The user's innermost line in a traceback."""
    found = None
    while traceback is not None:
        if not _is_ours(traceback.tb_frame):
            found = source_line(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def source_line(file: str, line: int) -> SourceLine:
    """A line with its text, where the text can be found."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _OURS
