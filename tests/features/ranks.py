"""What two processes of a gloo group do: steps of DDP and FSDP2, each rank on its half of a batch, results to a file.

python tests/features/ranks.py RANK FOLDER
"""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it has no pytest to do it
from codetta.capture.backend import recording
from ways import counts, forward_plans, llama

WORLD, STEPS, MICRO_BATCHES, CLIP, RATE = 2, 2, 2, 0.5, 0.5
Result = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights


def build() -> nn.Module:
    """A Llama whose parameters fill two buckets of DDP."""
    return llama(vocab_size=6000)


def batch(step: int, part: int) -> Tensor:
    """The token ids of all ranks, a row each."""
    return torch.randint(0, 128, (WORLD, 12), generator=torch.Generator().manual_seed(10 * step + part))


def train(
    model: nn.Module, rows: slice, accumulate: Callable[[bool], None], full: Callable[[nn.Module], Any]
) -> Result:
    """Two steps of two micro-batches, the norm clipped. ``accumulate`` is told whether gradients are exchanged."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(MICRO_BATCHES):
            accumulate(part == MICRO_BATCHES - 1)
            ids = batch(step, part)[rows]
            loss = model(input_ids=ids, labels=ids).loss / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.clone() for name, p in full(model).items()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def one_process(model: nn.Module) -> Result:
    """The same on the whole batch in one process."""
    return train(model, slice(None), lambda last: None, parameters)


def ddp(model: nn.Module, rank: int, regime: str) -> Result:
    """DDP with two buckets, which split the model; the first micro-batch exchanges nothing, as under ``no_sync``."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    if regime == "blocks":
        _blocks(model)
    called = parallel if regime == "blocks" else torch.compile(parallel, backend="codetta")

    def exchange(last: bool) -> None:
        parallel.require_backward_grad_sync = last  # what no_sync() sets

    return train(called, slice(rank, rank + 1), exchange, lambda m: parameters(model))


def fsdp(model: nn.Module, rank: int, regime: str, **policy: Any) -> Result:
    """FSDP2 around each block and the rest."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    if regime == "blocks":
        _blocks(model)
    elif regime == "whole":
        model.compile(backend="codetta")
    whole = StateDictOptions(full_state_dict=True)
    return train(
        model,
        slice(rank, rank + 1),
        model.set_requires_gradient_sync,
        lambda m: get_model_state_dict(m, options=whole),
    )


def _blocks(model: nn.Module) -> None:
    for block in model.model.layers:
        block.compile(backend="codetta")


def cases(rank: int) -> dict[str, Callable[[nn.Module], Result]]:
    """What is run in turn. Those of eager are what mixed precision is compared with."""
    narrow = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    return {
        "ddp whole": lambda m: ddp(m, rank, "whole"),
        "ddp blocks": lambda m: ddp(m, rank, "blocks"),
        "fsdp whole": lambda m: fsdp(m, rank, "whole"),
        "fsdp blocks": lambda m: fsdp(m, rank, "blocks"),
        "fsdp bfloat16": lambda m: fsdp(m, rank, "blocks", **narrow),
        "fsdp bfloat16 eager": lambda m: fsdp(m, rank, "eager", **narrow),
    }


def main(rank: int, folder: Path) -> None:
    """Every case from the same weights; what failed is its text."""
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    model = build()
    for name, run in cases(rank).items():
        torch._dynamo.reset()
        try:
            with recording() as graphs:
                result = run(copy.deepcopy(model))
            found[name] = (*result, counts(forward_plans(graphs))["gemms"])
        except Exception:  # the other cases are to run all the same
            found[name] = traceback.format_exc()
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
