"""Tiny models, and a backend that keeps what Dynamo handed over beside its normalised form."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from codetta.capture.normalise import ignore_warning_loggers, normalise

VOCABULARY = 256
FORBIDDEN = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "tag_activation_checkpoint", "inference_mode")
LLAMA_LIKE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


class MetaStyle(nn.Module):
    """One attention layer as in Meta's own Llama: complex rotation of adjacent pairs, nn.RMSNorm, no Hugging Face."""

    def __init__(self, width: int = 64, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in "qkv"})
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(length), 1.0 / 1e4 ** (torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        rotation = self.rotation[: x.shape[1]].view(1, x.shape[1], 1, self.size // 2)
        return torch.view_as_real(pairs * rotation).flatten(3).type_as(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        h = self.norm(x)
        q, k, v = (self.qkv[name](h).unflatten(-1, (self.heads, self.size)) for name in "qkv")
        q, k, v = (t.transpose(1, 2) for t in (self.rotate(q), self.rotate(k), v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.output(x + y.transpose(1, 2).flatten(2)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def build(name: str, **changes: Any) -> nn.Module:
    """A fresh tiny model in training mode, the same weights each time."""
    torch.manual_seed(0)
    config = LLAMA_LIKE | changes
    models: dict[str, Callable[[], nn.Module]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**config)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**config, head_dim=16)),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**{"sliding_window": 16} | config, head_dim=16)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**{"sliding_window": 16} | config)),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**config, pad_token_id=0, partial_rotary_factor=0.5)),
        "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**config)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                n_embd=64,
                n_layer=2,
                n_head=4,
                vocab_size=VOCABULARY,
                n_positions=64,
                use_cache=False,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                bos_token_id=None,
                eos_token_id=None,
            )
        ),
        "meta": MetaStyle,
    }
    return models[name]().train()


def run(gm: Callable[..., Any], inputs: Iterable[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Outputs of ``gm`` and the gradients of the sum of their squares, on fresh copies of the inputs."""
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    torch.manual_seed(3)
    outputs = gm(*fresh)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(y.float().square().sum() for y in outputs if isinstance(y, Tensor) and y.requires_grad)
    if isinstance(total, Tensor):
        total.backward()
    return outputs, [x.grad if isinstance(x, Tensor) else None for x in fresh], fresh


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a == b
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b)


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Bit for bit: outputs, gradients, and inputs that the graph writes to."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [same(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)
    assert any(g is not None and g.abs().sum() > 0 for g in expected[1])


@dataclass
class Captured:
    """What the backend saw on its last call: Dynamo's graph, the normalised one, and the inputs of the last run."""

    dynamo: list[GraphModule] = field(default_factory=list)
    normalised: list[GraphModule] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    compiled: Callable[..., Any] | None = None

    def backend(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.dynamo.append(gm)
        self.normalised.append(normalise(gm, example_inputs))

        def run(*inputs: Any) -> Any:
            self.inputs = list(inputs)
            with torch.autocast("cpu", enabled=False):
                return self.normalised[-1](*inputs)

        return run

    @property
    def graph(self) -> GraphModule:
        """The last normalised graph."""
        return self.normalised[-1]

    def ops(self) -> list[str]:
        """The operators of the last normalised graph, in order."""
        return [str(n.target) for n in self.graph.graph.nodes if n.op == "call_function"]

    def assert_explicit(self) -> None:
        """No node depends on a mode."""
        for node in self.graph.graph.nodes:
            assert node.op in ("placeholder", "get_attr", "call_function", "output")
            assert not any(word in str(node.target) for word in FORBIDDEN), node.target

    def assert_same_as_dynamo(self, autocast: bool = False) -> None:
        """The normalised graph is Dynamo's graph in outputs, gradients and written inputs."""
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = run(self.dynamo[-1], self.inputs)
        assert_same(run(self.graph, self.inputs), expected)

    def assert_same_as(self, f: Callable[..., Any], operands: Iterable[Any]) -> None:
        """The compiled function is ``f``."""
        operands = list(operands)
        assert self.compiled is not None
        assert_same(run(self.compiled, operands), run(f, operands))


@pytest.fixture(name="build")
def _build() -> Callable[..., nn.Module]:
    return build


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def capture() -> Callable[..., Captured]:
    """``capture(f, *args, **kwargs)`` compiles and runs ``f`` once, and returns what the backend saw."""
    torch._dynamo.reset()
    ignore_warning_loggers()

    def run(f: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> Captured:
        captured = Captured()
        captured.compiled = torch.compile(f, backend=captured.backend, fullgraph=True, dynamic=dynamic)
        captured.compiled(*args, **kwargs)
        return captured

    return run


@pytest.fixture
def operands() -> list[Tensor]:
    """Two small matrices, (4, 8) and (8, 8), that require gradients."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, 8, generator=generator).requires_grad_() for n in (4, 8)]
