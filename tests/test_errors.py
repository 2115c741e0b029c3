"""An error prints what happened, where, and what to do; it survives a trip between processes."""

import inspect
import pickle

import pytest

from codetta import errors
from codetta.errors import CodettaError, ShapeError, SourceLine

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CodettaError)]
LINE = SourceLine("model.py", 12, "    y = x @ w\n")


def test_message_place_and_hint():
    error = ShapeError("matmul: inner sizes differ: 8 and 6", where=LINE, hint="transpose w")
    assert str(error) == "matmul: inner sizes differ: 8 and 6\n  at model.py:12: y = x @ w\n  hint: transpose w"


def test_message_alone():
    assert str(CodettaError("no")) == "no"


def test_line_without_text():
    assert str(SourceLine("<graph>", 3)) == "<graph>:3"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_when_and_pickles(kind: type[CodettaError]):
    assert kind.__doc__
    error = pickle.loads(pickle.dumps(kind("m", where=LINE, hint="h")))
    assert (type(error), error.message, error.where, error.hint) == (kind, "m", LINE, "h")
