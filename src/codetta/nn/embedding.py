"""An embedding whose gradient is added where its weight's gradient is already.

It is a few rows of a large matrix. Inductor adds them to zeros in float32, rounds the whole, and where a head is tied
to the embedding adds that to the head's gradient: up to four passes over a matrix of the weight's size. Here a tied
head takes the weight from the embedding's hand, so that its gradient is there first, and the rows are added to it in
place; without one they are added to zeros of the weight's own dtype. Rows of one id are summed up in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from codetta.backends import add_rows, backend_on

LIBRARY = torch.library.Library("codetta", "FRAGMENT")
LIBRARY.define("add_rows_(Tensor(a!) into, Tensor ids, Tensor rows, int padding) -> ()")


def embedding_and_weight(weight: Tensor, ids: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The rows of ``weight`` (columns, features) that ``ids`` name, and the weight for whoever reads it after. The
    gradient that comes back for that one is written over: it must be nobody else's, as where operators of ours make
    it. ``padding`` is the id whose row gets no gradient of the embedding, -1 for none."""
    rows, again = _Embedding.apply(weight, ids, padding)
    return rows, again


class _Embedding(torch.autograd.Function):
    """Both as one node of autograd's graph, behind all readers of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """The rows, and the weight itself."""
        ctx.save_for_backward(ids)
        ctx.padding, ctx.shape = padding, weight.shape
        ctx.set_materialize_grads(False)
        return torch.nn.functional.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor | None, d_weight: Tensor | None) -> tuple[Tensor | None, None, None]:
        """The weight's gradient."""
        if d_rows is None:
            return d_weight, None, None
        (ids,) = ctx.saved_tensors
        into = d_rows.new_zeros(ctx.shape) if d_weight is None else d_weight
        torch.ops.codetta.add_rows_(into, ids.reshape(-1), d_rows.reshape(-1, ctx.shape[1]), ctx.padding)
        return into, None, None


def _add_rows(into: Tensor, ids: Tensor, rows: Tensor, padding: int) -> None:
    fits = into.is_contiguous() and into.dtype != torch.float64
    with torch.no_grad():
        add_rows(backend_on(into.device) if fits else "reference")(into, ids, rows.contiguous(), padding)


LIBRARY.impl("add_rows_", _add_rows, "CompositeExplicitAutograd")
torch.library.register_fake("codetta::add_rows_", lambda into, ids, rows, padding: None, lib=LIBRARY)
