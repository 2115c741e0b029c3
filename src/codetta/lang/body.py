"""A function run once on traced values: its results become the outputs of a Program."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from codetta.core.node import Node
from codetta.errors import BlockLocalError, CodettaError, SourceLine, TypeMismatch
from codetta.ir import legal, ops
from codetta.ir.program import Gemm, Program, Role, param_name
from codetta.lang import record
from codetta.lang.annotations import Value, number_of, wrap
from codetta.lang.expression import ATOM, Text, expression
from codetta.lang.functions import LANGUAGE
from codetta.lang.rule_ways import around_the_rule
from codetta.lang.signature import definition, parameters
from codetta.lang.teach import renamed, stored_last, without_extras

RETURN = "end with `return dict(name=value, ...)`, one entry for each tile or vector to store, or return one value"
MAX_EXPRESSION = 60  # characters of an expression in an error


def program_of(
    fn: Callable[..., Any], role: Role, name: str, gemm: Gemm | None, scope: Mapping[str, object]
) -> Program:
    """The Program that ``fn`` describes. ``scope`` holds the names around it, for annotations given as text."""
    where = definition(fn)
    params = parameters(fn, role, scope)
    with record.recording() as trace:
        result = _run(fn, params)
    outputs = _outputs(result, where)
    for key, n in outputs if isinstance(result, Mapping) else ():
        trace.names.setdefault(n, key)
    trace.names.update({p: param_name(p) for p in params})
    roots = [n for _, n in outputs]
    found = legal.why_not(role, roots, params[0] if role == "epilogue" else None, lambda n: _told(n, trace.names))
    if found is not None:
        line = trace.lines.get(found.node, where)
        write = around_the_rule(role, found, name, trace.names, line)
        raise BlockLocalError(f"{name}: {found.reason}", where=line, hint=found.hint, write=write)
    try:
        return Program(name, role, params, outputs, gemm)
    except CodettaError as e:
        raise e.told(e.message, where) from None


def _run(fn: Callable[..., Any], params: tuple[Node, ...]) -> object:
    try:
        return fn(*map(wrap, params))
    except NameError as e:
        line = record.line_of_error(e.__traceback__)
        name = str(e.name)
        write = f"from codetta import {name}" if name in LANGUAGE else renamed(line, name)
        raise TypeMismatch(f"{fn.__name__}: {e}", where=line, hint=_similar(name), write=write) from e
    except (TypeError, AttributeError) as e:
        line = record.line_of_error(e.__traceback__)
        hint = "a program's body is Python on traced values: operators, the language's functions, and numbers"
        write = renamed(line, str(e.name)) if isinstance(e, AttributeError) else without_extras(line, e)
        raise TypeMismatch(f"{fn.__name__}: {e}", where=line, hint=hint, write=write) from e


def _similar(name: str) -> str:
    close = difflib.get_close_matches(name, LANGUAGE, n=3, cutoff=0.6)
    if name in LANGUAGE:
        return f"`from codetta import {name}`"
    start = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{start}The language's functions are listed in docs/language.md; import them from codetta"


def _outputs(result: object, where: SourceLine) -> tuple[tuple[str, Node], ...]:
    match result:
        case None:
            message, write = "the function returns nothing, so nothing is stored", stored_last(where)
            raise TypeMismatch(message, where=where, hint=RETURN, write=write)
        case Value():
            return (("out", result.node),)
        case Mapping() if result:
            return tuple((_key(key, where), _output(key, value, where)) for key, value in result.items())
    shown = "an empty dict" if isinstance(result, Mapping) else f"a {type(result).__name__}"
    message, write = f"the function returns {shown}; every output has a name", stored_last(where)
    raise TypeMismatch(message, where=where, hint=RETURN, write=write)


def _key(key: object, where: SourceLine) -> str:
    if isinstance(key, str):
        return key
    raise TypeMismatch(f"an output is called {key!r}; names are text", where=where, hint=RETURN)


def _output(key: object, value: object, where: SourceLine) -> Node:
    if isinstance(value, Value):
        return value.node
    if number_of(value) is not None:
        hint, write = f"write const({value!r}) to store a number as a Scalar", f"return dict({key}=const({value!r}))"
        raise TypeMismatch(f"output `{key}` is the plain number {value!r}", where=where, hint=hint, write=write)
    hint = "return each part under its own name" if isinstance(value, tuple) else RETURN
    raise TypeMismatch(f"output `{key}` is a {type(value).__name__}, no traced value", where=where, hint=hint)


def _told(n: Node, names: Mapping[Node, str]) -> str:
    """A value as the user knows it: its variable, with what it is, or the expression."""
    if n.op is ops.INPUT:
        return f"`{names.get(n, param_name(n))}`"
    made = _short(expression(n, lambda a: _spelled(a, names)))
    return f"`{names[n]}` (= {made})" if n in names else f"`{made}`"


def _spelled(n: Node, names: Mapping[Node, str], depth: int = 3) -> Text:
    if n in names or not depth:
        return Text(names.get(n, "..."), ATOM)
    return expression(n, lambda a: _spelled(a, names, depth - 1))


def _short(text: Text) -> str:
    return text.text if len(text.text) <= MAX_EXPRESSION else f"{text.text[: MAX_EXPRESSION - 3]}..."
