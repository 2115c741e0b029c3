"""Parameters that a plan reads as one tensor, laid side by side in one buffer; names, values and objects stay."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from codetta.backends.stacked import are_adjacent
from codetta.errors import UnsupportedError

ALIGNMENT = 16  # bytes: what vectorised kernels load at once, and what Inductor found its parameters aligned to
log = logging.getLogger("codetta")


@dataclass(frozen=True, slots=True)
class Stack:
    """Parameters that plans stack, by name in order; the reason why they do not lie side by side, or None."""

    names: tuple[str, ...]
    reason: str | None


_LAYOUTS: dict[tuple[str, ...], None] = {}  # what graphs stacked so far, named from their nearest common module
_told: set[str] = set()


def pack_(model: nn.Module, layouts: Sequence[Sequence[str]] | None = None) -> tuple[Stack, ...]:
    """Lay side by side what plans stack (q, k and v; gate and up): what compiling does by itself, done again after the
    model was moved or cast, or its parameters were replaced.

    ``layouts`` are the names of such parameters from the module that holds them, as in ``[("q_proj.weight",
    "k_proj.weight", "v_proj.weight")]``; by default those that graphs compiled in this process stack. Every module of
    ``model`` that has them all is packed. The answer says for each whether it is, or why not."""
    if layouts is None and not _LAYOUTS:
        hint = "run the compiled model once, or name them: pack_(model, [('gate_proj.weight', 'up_proj.weight')])"
        raise UnsupportedError("no graph compiled in this process stacks parameters", hint=hint)
    found: list[Stack] = []
    for path, module in model.named_modules():
        for names in list(_LAYOUTS) if layouts is None else layouts:
            group = [p for p in (_parameter(module, name) for name in names) if p is not None]
            if len(group) == len(names):
                full = tuple(f"{path}.{name}" if path else name for name in names)
                found.append(Stack(full, pack_group(group)))
    _release()
    _told.clear()
    return tuple(found)


def pack_graph(groups: Sequence[tuple[tuple[str, ...], Sequence[object]]]) -> tuple[Stack, ...]:
    """Pack what one compiled graph stacks: for each group the parameters' names, and its inputs at their places.

    Where an input is no parameter (fake tensors under DDP, FSDP's shards), ``pack_`` can still do it later."""
    found: list[Stack] = []
    for names, values in groups:
        found.append(Stack(names, pack_group(values)))
    if any(s.reason is None for s in found):
        _release()
    for s in found:
        if s.reason is not None:
            log.info("%s stay where they are: %s", ", ".join(s.names), s.reason)
    return tuple(found)


def remember(names: tuple[str, ...]) -> None:
    """Note what a graph stacks, for ``pack_``."""
    _LAYOUTS.setdefault(_from_common_module(names))


def pack_group(values: Sequence[object]) -> str | None:
    """Make parameters views of one new buffer, in order; the reason if they cannot be, and nothing is changed then.

    ``p.data = view`` keeps the Parameter: optimizers, hooks and ties hold the object. Each is no view to autograd and
    has a version of its own. One group at a time, so that the copy needs the memory of one."""
    group = [p for p in values if type(p) is nn.Parameter]
    if len(group) < len(values):
        other = next(type(v).__name__ for v in values if type(v) is not nn.Parameter)
        return f"one of them is a {other}, no plain parameter"
    if are_adjacent(group):
        return None
    reason = why_not(group)
    if reason is not None:
        return reason
    first = group[0]
    rows = [p.shape[0] for p in group]
    with torch.inference_mode(False), torch.no_grad():
        if first.is_cuda:
            torch.cuda.synchronize(first.device)  # other streams may still read what is about to be freed
        try:
            buffer = torch.empty(sum(rows), *first.shape[1:], dtype=first.dtype, device=first.device)
        except torch.OutOfMemoryError:
            return "there is no memory for a copy of them"
        for p, part in zip(group, buffer.split(rows), strict=True):
            part.copy_(p)
            p.data = part
    return None


def why_not(group: Sequence[nn.Parameter]) -> str | None:
    """The reason why parameters must stay where they are, or None."""
    first = group[0]
    if len({id(p) for p in group}) < len(group):
        return "one of them is there twice"
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    at = 0
    for p in group:
        alike = (p.dtype, p.device, p.shape[1:], p.requires_grad)
        if alike != (first.dtype, first.device, first.shape[1:], first.requires_grad):
            return "they differ in dtype, device, row size or requires_grad"
        reason = _why_not_move(p)
        if reason is not None:
            return reason
        if at % ALIGNMENT:
            return f"one would begin {at} bytes after the first, at no multiple of {ALIGNMENT}"
        at += p.numel() * p.element_size()
    return None


def _why_not_move(p: nn.Parameter) -> str | None:
    if p.device.type == "meta":
        return "they are on the meta device and have no memory"
    if p.layout is not torch.strided or not p.is_contiguous() or not p.dim():
        return "one of them is not contiguous"
    if not p.is_leaf or p.is_inference():
        return "one of them is computed, or belongs to inference mode"
    if p.device.type == "cpu" and p.is_shared():
        return "one of them is shared with other processes"
    storage = p.untyped_storage()
    if storage.nbytes() != p.numel() * p.element_size() or _owners(p) > _owners(torch.empty(1)):
        return "one of them shares its memory with another tensor, if only one that a backward still to come has saved"
    return None


def _owners(t: Tensor) -> int:
    """How many tensors there are in the memory of one, counted the same way for all."""
    return int(torch._C._storage_Use_Count(t.untyped_storage()._cdata))


def tell_copies(groups: Sequence[tuple[tuple[str, ...], Sequence[Tensor]]]) -> None:
    """Warn, once until ``pack_`` is called, if parameters that were to lie side by side do not."""
    apart = next((names for names, blocks in groups if not are_adjacent(blocks)), None)
    if apart is None or _told:
        return
    _told.update(apart)
    warnings.warn(
        f"codetta copies stacked parameters in every step, since they do not lie side by side in memory: "
        f"{', '.join(apart)}. Moving, casting or replacing them does that. codetta.pack_(model) lays them side by side "
        "again, and says why where it cannot; options={'pack': False} leaves them alone and silences this",
        stacklevel=2,
    )


def _from_common_module(names: Sequence[str]) -> tuple[str, ...]:
    """The names without the path of the nearest module that holds them all."""
    paths = [n.split(".") for n in names]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return tuple(".".join(p[shared:]) for p in paths)


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    *path, last = name.split(".")
    holder: nn.Module | None = module
    for part in path:
        holder = None if holder is None else holder._modules.get(part)
    return None if holder is None else holder._parameters.get(last)


def _release() -> None:
    """Give what the old copies held back to the driver: pieces of one weight each fit no buffer of several."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
