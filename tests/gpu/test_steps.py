"""Whole training steps behind Inductor: no wait for the device, and CUDA graphs that Inductor records and replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from target import DEVICE
from ways import compiled, llama

pytestmark = pytest.mark.usefixtures("cuda_only")


def training(**options: object) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """An unmodified Llama, and one step of it with clipping and a fused optimizer, which gives the loss."""
    model = llama(dtype=torch.bfloat16, hidden_size=256, intermediate_size=512).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ours = compiled(model, inner="inductor", **options)
    batches = torch.randint(128, (8, 2, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def step(i: int) -> Tensor:
        loss = ours(input_ids=batches[i], labels=batches[i]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    return model, step


@pytest.mark.parametrize("logits", ["auto", "never"])
def test_no_step_waits_for_the_device(logits: str):
    """PyTorch raises where the host would wait."""
    _, step = training(logits=logits)
    for i in range(2):
        step(i)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("logits", ["auto", "never"])
def test_cuda_graphs_by_inductor(logits: str):
    """With ``cudagraphs=True`` graphs are replayed, on other batches and on weights that an optimizer changed in place:
    losses and weights are to the bit those without."""
    found = {}
    for graphs in (False, True):
        torch._dynamo.utils.counters.clear()
        model, step = training(cudagraphs=graphs, logits=logits)
        losses = [step(i) for i in range(6)]
        found[graphs] = [*losses, *(p.detach().clone() for p in model.parameters())]
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        step(6)
    assert sum(e.count for e in profile.key_averages() if "cudaGraphLaunch" in e.key) == 2  # forward and backward
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))
