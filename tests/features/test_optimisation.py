"""What stands between a gradient and a weight: accumulation, clipping, optimizers, loss scaling."""

import copy

import pytest
import torch

from features.training import REGIMES, Recipe, assert_same_training, compile_, gemms_compiled, train
from ways import llama

CLIP = 0.5


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.1, fused=True)


RECIPES = {
    "accumulation": Recipe(micro_batches=3),
    "accumulation into zeros": Recipe(micro_batches=2, set_to_none=False),
    "clipping": Recipe(clip=CLIP),
    "fused AdamW": Recipe(optimizer=fused_adamw),
    "all together": Recipe(micro_batches=2, clip=CLIP, optimizer=fused_adamw),
}


CASES = [*((name, "whole") for name in RECIPES), ("accumulation into zeros", "blocks"), ("all together", "blocks")]


@pytest.mark.parametrize("name, regime", CASES)
def test_recipe(name, regime):
    """Three steps from the same weights on the same batches end where eager's do."""
    model = llama()
    eager = train(copy.deepcopy(model), RECIPES[name])
    with gemms_compiled():
        ours = train(compile_(model, regime), RECIPES[name])
    assert all(n > CLIP for n in ours.norms)  # otherwise nothing was clipped
    # Adam divides by the gradient's own size, so where it is near zero it is the rounding error that is scaled up
    assert_same_training(ours, eager, bound=1e-4 if "AdamW" in name or "all" in name else 1e-5)


@pytest.mark.parametrize("regime", REGIMES)
def test_accumulated_gradient_is_that_of_the_whole_batch(regime):
    """Micro-batches add up, against float64: the gradients are written to no memory that an earlier one lies in."""
    model = llama()
    exact = copy.deepcopy(model).double()
    recipe = Recipe(steps=1, micro_batches=4)
    ours, exact = train(compile_(model, regime), recipe), train(exact, recipe)
    assert_same_training(ours, exact)


@pytest.mark.parametrize("regime", REGIMES)
def test_gradient_scaler(regime):
    """float16 autocast with GradScaler and clipping behind ``unscale_``. The third step overflows: it is skipped, here
    and in eager alike. The weights move as far away from a float32 run as eager's do, and no farther."""
    model = llama()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    recipe = Recipe(steps=4, clip=CLIP, autocast=torch.float16, scales=(None, None, 2.0**40, 2.0**12))
    eager = train(copy.deepcopy(model), recipe)
    skipped = Recipe(steps=4, clip=CLIP)
    exact_model = copy.deepcopy(model)
    exact = train_without(exact_model, skipped, step=2)
    with gemms_compiled():
        ours = train(compile_(model, regime), recipe)
    assert ours.scales == eager.scales == [2.0**12, 2.0**12, 2.0**39, 2.0**12]
    for name, start in before.items():
        moved = exact[name] - start
        mine, theirs = ((w[name] - start - moved).norm() / moved.norm() for w in (ours.weights, eager.weights))
        assert mine < 1.2 * theirs + 2**-12, name


def train_without(model, recipe, step):
    """The weights of a run that leaves out one step."""
    optimizer = recipe.optimizer(list(model.parameters()))
    parts = [Recipe(steps=step, clip=CLIP), Recipe(steps=recipe.steps - step - 1, clip=CLIP, first_batch=step + 1)]
    return [train(model, part, optimizer) for part in parts][-1].weights
