"""Who runs the segments: kernels where the graph's GPUs have them, else Inductor with one warning, or an error."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from codetta.backends import BACKENDS
from codetta.backends.hopper import support
from codetta.backends.hopper.stream import device_of, on_device
from codetta.backends.stacked import are_adjacent
from codetta.capture import backend as entry
from codetta.capture.backend import backend, recording
from codetta.capture.kernels import Target, target
from codetta.capture.options import parse
from codetta.errors import SettingsError
from ways import compiled

REASON = "NVIDIA A100 has compute capability 8.0"


class OnGpu(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True
    device = property(lambda self: torch.device("cuda", self.index))


def on_gpu(index: int) -> Tensor:
    found = torch.zeros(2).as_subclass(OnGpu)
    found.index = index
    return found


@pytest.fixture
def only_gpu_one(monkeypatch) -> None:
    """Kernels run on GPU 1, the current one, and not on GPU 0."""
    monkeypatch.setattr(support, "why_not", lambda index=None: REASON if index == 0 else None)


@pytest.fixture
def nowhere(monkeypatch) -> None:
    monkeypatch.setattr(support, "why_not", lambda index=None: REASON)


def test_by_the_gpus_of_the_graph(only_gpu_one):
    auto = parse({})
    assert target(auto, "cuda", [on_gpu(1), 3]) == Target("hopper")
    assert target(auto, "cuda", [on_gpu(0)]) == Target("hopper", REASON)
    assert target(auto, "cuda", [on_gpu(1), on_gpu(0)]) == Target("hopper", REASON)
    assert target(auto, "cpu", [torch.zeros(2)]) == Target("reference")
    assert target(auto, "meta", [torch.zeros(2, device="meta")]) == Target("reference")


@pytest.mark.parametrize("options", [{"kernels": "reference"}, {"widen": True}])
def test_the_reference_where_it_is_asked_for(only_gpu_one, options):
    """Kernels know no float64."""
    assert target(parse(options), "cuda", [on_gpu(1)]) == Target("reference")


def test_insisting(only_gpu_one):
    hopper = parse({"kernels": "hopper"})
    assert target(hopper, "cuda", [on_gpu(1)]) == Target("hopper")
    assert target(hopper, "cpu", [torch.zeros(2, dtype=torch.int64)]) == Target("reference")  # sizes between two graphs
    with pytest.raises(SettingsError, match=f"option kernels='hopper', but {REASON}"):
        target(hopper, "cuda", [on_gpu(0)])
    with pytest.raises(SettingsError, match="the model is on the cpu"):
        target(hopper, "cpu", [torch.zeros(2)])


def test_insisting_in_vain(nowhere):
    module = torch.fx.symbolic_trace(nn.Identity())
    with pytest.raises(SettingsError, match=f"{REASON}(.|\n)*hint: kernels='auto' takes what there is"):
        backend(module, [torch.zeros(1)], options={"kernels": "hopper"})


def test_one_warning_a_reason(monkeypatch):
    """Every graph of a model is left to Inductor; the reason is told once."""
    monkeypatch.setattr(entry, "_device", lambda example_inputs: "cuda")
    monkeypatch.setattr(entry, "lookup_backend", lambda name: lambda gm, example_inputs: gm.forward)
    monkeypatch.setattr(entry, "_TOLD", set())
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    for reason in (REASON, "another"):
        monkeypatch.setattr(support, "why_not", lambda index=None, reason=reason: reason)
        with pytest.warns(UserWarning, match=f"{reason}.*Inductor unchanged"):
            compiled(module)(x)
        with recording() as found:  # a second warning would be an error
            torch.testing.assert_close(compiled(module)(x), module(x))
        assert found == []


def test_kernels_by_themselves(monkeypatch):
    """Where kernels run nobody asks for them: segments go to their backend, and stacked weights are packed."""
    monkeypatch.setattr(entry, "_device", lambda example_inputs: "cuda")
    monkeypatch.setattr(entry, "lookup_backend", lambda name: lambda gm, example_inputs: gm.forward)
    monkeypatch.setattr(support, "why_not", lambda index=None: None)
    monkeypatch.setitem(BACKENDS, "hopper", BACKENDS["reference"])

    class Siblings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.sigmoid(self.a(x)) * self.b(x))

    module, x = Siblings(), torch.randn(4, 8)
    with recording() as found:
        y = compiled(module)(x)
    torch.testing.assert_close(y, module(x))
    assert {segment.options.backend for graph in found for _, segment in graph.compiled()} == {"hopper"}
    assert are_adjacent([module.a.weight, module.b.weight])


def test_a_segment_runs_on_its_own_device(monkeypatch):
    """The current device is switched where a segment's tensors are on another one, and only there."""
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    zero, one, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    for device in (cpu, zero):
        on_device(device)
    assert entered == []
    on_device(one)
    assert entered == [one]
    tensors = [SimpleNamespace(is_cuda=d.type == "cuda", device=d) for d in (cpu, one)]
    assert (device_of(tensors), device_of(tensors[:1])) == (one, cpu)


def test_loggers_are_ignored_whenever_they_come(monkeypatch):
    """transformers may be imported after codetta."""
    if torch.__version__ < "2.13":
        pytest.skip("PyTorch cannot be told so")
    monkeypatch.setattr("logging.Logger.warning_once", lambda self, *args: None, raising=False)
    with torch._dynamo.config.patch(ignore_logging_functions=set()), warnings.catch_warnings():
        compiled(nn.Linear(4, 4))(torch.zeros(2, 4))
        assert torch._dynamo.config.ignore_logging_functions


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_while_the_rest_is(fails, monkeypatch):
    """They are begun before whoever compiles the rest, and waited for behind that, also where it fails."""
    order: list[str] = []

    def inner(gm, inputs):
        order.append("inner")
        if fails:
            raise RuntimeError("no compiler")
        return gm

    monkeypatch.setattr(entry, "prepare", lambda *_, **__: (order.append("begun"), lambda: order.append("waited"))[1])
    monkeypatch.setattr(entry, "lookup_backend", lambda name: inner)
    ours = compiled(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    if fails:
        with pytest.raises(Exception, match="no compiler"):
            ours(torch.randn(4, 8))
    else:
        ours(torch.randn(4, 8))
    assert order == ["begun", "inner", "waited"]
