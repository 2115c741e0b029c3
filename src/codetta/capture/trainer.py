"""The backend's name for transformers' Trainer: accelerate, which compiles for it, knows a fixed list of names."""

from __future__ import annotations

from typing import Any

from codetta.errors import UnsupportedError

NAME = "CODETTA"


def register_with_accelerate() -> None:
    """Make ``TrainingArguments(torch_compile_backend="codetta")`` and ``Accelerator(dynamo_backend="codetta")`` mean
    ``torch.compile(model, backend="codetta")``. To be called in each process that trains, before the Trainer is made;
    once is enough.

    accelerate's names are the members of an enumeration, ``DynamoBackend``. It gets an answer to a name that is no
    member, through the hook that enumerations have for that; its members and their list stay as they are."""
    try:
        from accelerate.utils import DynamoBackend
    except ImportError:
        raise UnsupportedError("accelerate is not installed", hint="pip install accelerate") from None
    if NAME in DynamoBackend:
        return
    ours: Any = str.__new__(DynamoBackend, NAME)
    ours._name_ = ours._value_ = NAME
    others = DynamoBackend._missing_

    def missing(cls: type, value: object) -> Any:
        """Ours, or what accelerate answers."""
        return ours if value == NAME else others(value)

    DynamoBackend._missing_ = classmethod(missing)
