"""What a user may ask of the backend: ``torch.compile(model, backend="codetta", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from codetta.errors import SettingsError
from codetta.partition.cut import MEMORY, Memory

CHOICES: dict[str, tuple[object, ...]] = {
    "attention": ("auto", "sdpa"),
    "batch_invariant": (False, True),
    "cudagraphs": (False, True),
    "logits": ("auto", "always", "never"),
    "memory": MEMORY,
    "inner": ("auto", "eager", "aot_eager", "inductor"),
    "kernels": ("auto", "hopper", "reference"),
    "pack": ("auto", True, False),
    "prove_masks": (True, False),
    "rewrite": (True, False),
    "widen": (True, False),
}


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What may be asked for.

    ``attention``: "auto" runs attention that needs no mask, or is causal within a window, on FlashAttention where
    kernels run and flash-attn-4 is installed. "sdpa" leaves it to PyTorch.
    ``logits``: "auto" returns what the model returns; a head whose logits only its loss reads becomes one call with it
    where that saves their memory. "always" computes logits as the model does. "never" returns a placeholder for logits
    that raises when it is used, and makes that call of every such head.
    ``memory``: what forward keeps for backward, from "fast" (most) over "balanced" to "lean" (least).
    ``inner``: who runs what is no segment; "auto" is eager on a CPU, Inductor on a GPU.
    ``cudagraphs``: Inductor records forward and backward as CUDA graphs and replays them.
    ``kernels``: "auto" runs segments on kernels where there are some for the GPU, and leaves the graph to Inductor
    elsewhere; "hopper" insists on them; "reference" runs segments on PyTorch operators also on a GPU.
    ``pack``: parameters that plans stack (q, k and v) are laid side by side when a graph is compiled; "auto" does so
    where kernels run.
    ``batch_invariant``: on kernels, a row's result has the same bits however many other rows there are; bare GEMMs then
    run on our mainloop with a pinned tile, too. Without it, the library picks an algorithm by the number of rows; so it
    does for programs that are no single kernel, each of which is told at level "warning". Weight gradients sum rows.
    ``prove_masks``: an attention mask that is plainly causal is dropped, and attention takes its causal path. So is one
    that is causal within a window or documents, where Inductor runs the rest on a GPU: FlexAttention skips the rest.
    For bisecting and tests, ``rewrite=False`` leaves the captured graph as it is, and ``widen=True`` runs it in float64
    whatever casts it contains."""

    attention: str = "auto"
    logits: str = "auto"
    memory: Memory = "balanced"
    inner: str = "auto"
    kernels: str = "auto"
    pack: bool | str = "auto"
    cudagraphs: bool = False
    batch_invariant: bool = False
    prove_masks: bool = True
    rewrite: bool = True
    widen: bool = False


def parse(given: Mapping[str, Any] | None) -> BackendOptions:
    """The options given, checked: SettingsError names what is wrong and what there is."""
    given = dict(given or {})
    known = {f.name for f in fields(BackendOptions)}
    for name, value in given.items():
        if name not in known:
            raise SettingsError(f"no option {name!r}", hint=f"there are: {', '.join(sorted(known))}")
        if value not in CHOICES[name]:
            raise SettingsError(f"option {name}={value!r}", hint=f"one of {', '.join(map(repr, CHOICES[name]))}")
    return BackendOptions(**given)
