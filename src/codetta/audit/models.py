"""Models by name: a preset, a Hugging Face configuration folder, or ``module:callable``."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from codetta.capture.normalise import ignore_warning_loggers
from codetta.errors import SettingsError, UnsupportedError

DTYPES = {
    "f32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "f16": torch.float16,
    "float16": torch.float16,
    "f64": torch.float64,
    "float64": torch.float64,
}

CACHE_OFF = (
    "this configuration has use_cache on, and here it is off: in training, caches would only be returned and kept "
    "alive. Train with model.config.use_cache = False"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A model as the command line names it. ``tokens`` counts those of all ``batch`` sequences together; None leaves
    a number to the model."""

    name: str
    layers: int | None = None
    tokens: int | None = None
    batch: int | None = None
    dtype: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the keyword arguments of one call. ``renew(seed)`` gives it other random weights and makes another
    batch; None where the weights are somebody's. ``notes`` say what differs from what was named."""

    title: str
    model: nn.Module
    batch: dict[str, Any]
    renew: Callable[[int], dict[str, Any]] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Preset:
    """A Llama: its sizes, and the batch to take when none is asked for."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool
    theta: float = 500_000.0
    tokens: int = 16_384
    sequences: int = 2
    dtype: str = "bf16"

    def config(self, layers: int | None = None) -> Any:
        """The transformers configuration."""
        return transformers().LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers if layers is None else layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            rms_norm_eps=1e-5,
            max_position_embeddings=131_072,
            use_cache=False,  # in training it would only make the model return every layer's keys and values
            bos_token_id=None,
            eos_token_id=None,
        )


PRESETS = {
    "llama-tiny": Preset(4, 128, 352, 4, 2, 32, 256, tied=False, theta=1e4, tokens=512, sequences=4, dtype="f32"),
    "llama3-1b": Preset(16, 2048, 8192, 32, 8, 64, 128_256, tied=True),
    "llama3-8b": Preset(32, 4096, 14_336, 32, 8, 128, 128_256, tied=False),
    "llama3-70b": Preset(80, 8192, 28_672, 64, 8, 128, 128_256, tied=False),
}


def find(request: Request, *, weights: bool) -> Subject:
    """The model that is asked for, with a batch. Without ``weights`` a preset or a configuration is built on the meta
    device: it has shapes and takes no memory."""
    if request.name in PRESETS:
        preset = PRESETS[request.name]
        config = preset.config(request.layers)
        return _causal(request, config, (preset.tokens, preset.sequences, preset.dtype), weights=weights)
    folder = Path(request.name)
    if folder.is_dir() or folder.name == "config.json":
        return _from_folder(request, folder, weights=weights)
    if ":" in request.name:
        return _from_callable(request)
    raise SettingsError(
        f"no model {request.name!r}" + (": there is no such folder" if len(folder.parts) > 1 else ""),
        hint=f"a preset ({', '.join(PRESETS)}), a folder with a config.json, or module:callable",
    )


def as_batch(model: nn.Module, example: Mapping[str, Any] | Tensor) -> dict[str, Any]:
    """An example batch as keyword arguments; a tensor alone is the model's first argument."""
    if isinstance(example, Mapping):
        return dict(example)
    if not isinstance(example, Tensor):
        raise SettingsError(f"an example batch is a dict or a tensor, not a {type(example).__name__}")
    return {next(iter(inspect.signature(model.forward).parameters)): example}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a short or long name."""
    if name not in DTYPES:
        raise SettingsError(f"no dtype {name!r}", hint=f"one of {', '.join(DTYPES)}")
    return DTYPES[name]


def random_model(config: Any, dtype: torch.dtype, seed: int, device: str = "cpu") -> nn.Module:
    """A causal language model of transformers in training mode, as it is initialised; on "meta" it has no weights."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: nn.Module = transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def token_batch(vocabulary: int, shape: tuple[int, int], seed: int, device: str = "cpu") -> dict[str, Any]:
    """Random tokens as inputs and labels, of the lower half of the vocabulary: the other half is never a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(max(1, vocabulary // 2), shape, generator=generator) if device != "meta" else None
    ids = ids if ids is not None else torch.empty(shape, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def perturb_gains(model: nn.Module, seed: int) -> None:
    """Give every gain that is all ones (a fresh norm's) and every bias that is all zeros random values around them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1 and not p.is_meta and bool((p == p[0]).all()) and p[0].item() in (0.0, 1.0):
                noise = torch.rand(p.shape, generator=generator) - 0.5
                p.add_(noise.to(p.device, p.dtype), alpha=1.0 if p[0].item() else 0.2)


def _causal(request: Request, config: Any, defaults: tuple[int, int, str], *, weights: bool) -> Subject:
    """A causal language model of transformers, with random weights or none."""
    tokens, sequences, dtype = defaults
    shape = _shape(request.tokens or tokens, request.batch if request.batch is not None else sequences)
    wanted = dtype_named(request.dtype or dtype)
    device = "cpu" if weights else "meta"
    vocabulary = int(config.get_text_config().vocab_size)

    def renew(seed: int) -> dict[str, Any]:
        other = random_model(config, wanted, seed)
        perturb_gains(other, seed)
        model.load_state_dict(other.state_dict())
        return token_batch(vocabulary, shape, seed)

    model = random_model(config, wanted, request.seed, device)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    name = str(wanted).removeprefix("torch.")
    title = f"{request.name}: {layers} layers, {shape[0]} x {shape[1]} tokens, {name}"
    batch = token_batch(vocabulary, shape, request.seed, device)
    return Subject(title, model, batch, renew if weights else None)


def _shape(tokens: int, batch: int) -> tuple[int, int]:
    if batch < 1 or tokens < batch or tokens % batch:
        raise SettingsError(
            f"{tokens} tokens are not {batch} sequences of one length",
            hint="--tokens counts those of all sequences together, and --batch divides it",
        )
    return batch, tokens // batch


def _from_folder(request: Request, folder: Path, *, weights: bool) -> Subject:
    file = folder if folder.name == "config.json" else folder / "config.json"
    if not file.is_file():
        raise SettingsError(f"no config.json in {folder}", hint="a folder as save_pretrained writes it")
    config = transformers().AutoConfig.from_pretrained(str(file.parent), local_files_only=True)
    text = config.get_text_config()
    if request.layers is not None:
        text.num_hidden_layers = request.layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: request.layers]
    saved = str(getattr(config, "dtype", None) or "f32").removeprefix("torch.")
    cached = bool(getattr(text, "use_cache", False))
    text.use_cache = False
    found = _causal(request, config, (512, 1, saved), weights=weights)
    return replace(found, notes=(CACHE_OFF,)) if cached else found


def _from_callable(request: Request) -> Subject:
    """What ``module:callable`` returns; options reach the parameters of the callable that have their names."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = pkgutil.resolve_name(request.name)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "module:callable, importable from here"
        raise SettingsError(f"no model {request.name!r}: {error}", hint=hint) from None
    given = {"layers": request.layers, "tokens": request.tokens, "batch": request.batch, "seed": request.seed}
    taken = inspect.signature(function).parameters
    options = {name: value for name, value in given.items() if value is not None and name in taken}
    refused = [f"--{name}" for name, value in given.items() if value is not None and name not in (*taken, "seed")]
    if refused:
        hint = f"it takes {', '.join(taken) or 'nothing'}"
        raise SettingsError(f"{request.name} takes no {', '.join(refused)}", hint=hint)
    torch.manual_seed(request.seed)
    found = function(**options)
    match found:
        case (nn.Module() as model, (dict() | Tensor()) as batch):
            named = as_batch(model, batch)
        case _:
            hint = "return (model, example kwargs)"
            raise SettingsError(f"{request.name} returned {type(found).__name__}", hint=hint)
    if request.dtype is not None:
        dtype = dtype_named(request.dtype)
        model = model.to(dtype)
        named = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in named.items()}
    return Subject(request.name, model, named)


def transformers() -> Any:
    """The package, or UnsupportedError with the way out."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            "this model is built with transformers, which is not installed", hint="pip install 'codetta[hf]'"
        ) from None
    ignore_warning_loggers()  # what it finds is there only once transformers is
    return transformers
