"""Every program that the compiler makes prints as source that traces back to it."""

from random import Random

import pytest

from codetta.lang.source import parse_program, program_text
from codetta.partition.training import plan_training
from drive import float_inputs
from graphs import draw


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_random_graphs_trace_back(seed: int):
    graph = draw(Random(seed))
    training = plan_training(graph, float_inputs(graph))
    for step in [*training.forward.steps, *training.backward.steps]:
        text = program_text(step.program)
        assert parse_program(text) == step.program, text
