"""Why kernels cannot run: the device, the packages, where they lie. Nothing of theirs is imported to find out."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from codetta.backends import BACKENDS, get_backend
from codetta.backends.hopper import support
from codetta.backends.hopper.support import FLASH, PINS, why_not, why_not_flash, why_not_installed, why_not_version
from codetta.errors import SettingsError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    support._why_not_on.cache_clear()
    why_not_installed.cache_clear()
    why_not_flash.cache_clear()
    yield
    support._why_not_on.cache_clear()
    why_not_installed.cache_clear()
    why_not_flash.cache_clear()


def test_pins_are_those_of_pyproject():
    """One table in the code, one in pyproject.toml: they are the same."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, pins in (("hopper", PINS), ("flash", (FLASH,))):
        asked = [line.partition(";")[0].strip().replace("[cu13]", "") for line in extras[name]]
        assert asked == [f"{p.name}{p.versions}" for p in pins]


@pytest.mark.parametrize(
    "version, wanted",
    [
        ("2.13.0+cpu", ">=2.11,<2.15"),
        ("0.6.5", "==0.6.5"),
        ("0.1.15.post2", "==0.1.15.post2"),
        ("0.1.15.post2", ">=0.1.6,<0.2,!=0.1.8"),
        ("4.8.1", "==4.8.*"),
        ("4.8.1", "~=4.7"),
        ("4.9.0", "!=4.8.*"),
        ("1.0", ""),
        ("5", "<=5.0"),
    ],
)
def test_versions_that_fit(version, wanted):
    assert why_not_version(version, wanted) is None


@pytest.mark.parametrize(
    "version, wanted, reason",
    [
        ("2.10.1", ">=2.11,<2.15", "2.10.1 is not >=2.11"),
        ("2.15.0", "<2.15,>=2.11", "2.15.0 is not <2.15"),
        ("0.1.15", "==0.1.15.post2", "0.1.15 is not ==0.1.15.post2"),
        ("4.8.1", "==4.7.*", "4.8.1 is not ==4.7.*"),
        ("5.0.0", "~=4.7", "5.0.0 is not ~=4.7"),
        ("4.6.9", "~=4.7", "4.6.9 is not ~=4.7"),
        ("4.8.1", "!=4.8.*", "4.8.1 is not !=4.8.*"),
    ],
)
def test_versions_that_do_not_fit(version, wanted, reason):
    assert why_not_version(version, wanted) == reason


def gpus(monkeypatch, *found: tuple[str, int, int], current: int = 0) -> None:
    """Pretend that the machine has these GPUs."""
    properties = [SimpleNamespace(name=n, major=major, minor=minor) for n, major, minor in found]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])


def packages(monkeypatch, **versions: str | None) -> None:
    """Pretend that all packages are installed as pinned, but for these."""
    pinned = {p.name: p.versions.lstrip("=>") or "1" for p in PINS}
    known = {
        **pinned,
        FLASH.name: FLASH.versions.lstrip("="),
        **{name.replace("_", "-"): version for name, version in versions.items()},
    }

    def version(name: str) -> str:
        if known[name] is None:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(support.metadata, "version", version)
    origin = "/x/site-packages/cutlass/__init__.py"
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=origin))
    monkeypatch.setattr(support.sys, "platform", "linux")
    monkeypatch.setattr(support.platform, "machine", lambda: "x86_64")


H200, A100 = ("NVIDIA H200", 9, 0), ("NVIDIA A100", 8, 0)


def test_everything_is_there(monkeypatch):
    gpus(monkeypatch, H200)
    packages(monkeypatch)
    assert why_not() is None


def test_no_gpu(monkeypatch):
    gpus(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "sees no CUDA device" in why_not()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in why_not()


def test_each_device_is_asked(monkeypatch):
    gpus(monkeypatch, A100, H200, current=1)
    packages(monkeypatch)
    reason = "NVIDIA A100 has compute capability 8.0; there are kernels for 9.0"
    assert why_not(0).startswith(reason)
    assert why_not(torch.device("cuda", 0)).startswith(reason)
    assert why_not(1) is why_not() is why_not(torch.device("cuda")) is None
    assert "cpu" in why_not(torch.device("cpu"))


def test_what_is_missing_is_told_at_once(monkeypatch):
    gpus(monkeypatch, H200)
    packages(monkeypatch, quack_kernels="0.6.4", nvidia_cutlass_dsl=None)
    assert why_not() == (
        "quack-kernels 0.6.4 is not ==0.6.5; nvidia-cutlass-dsl is not installed: pip install 'codetta[hopper]'"
    )


def test_a_module_that_cannot_be_found(monkeypatch):
    packages(monkeypatch)
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    assert "nvidia-cutlass-dsl is installed, but there is no cutlass" in why_not_installed()


def test_a_folder_that_quack_cannot_live_in(monkeypatch):
    packages(monkeypatch)
    spec = SimpleNamespace(origin="/opt/kernels/cutlass/__init__.py")
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: spec)
    assert "lies in /opt/kernels/cutlass; no folder of its path is called site-packages" in why_not_installed()


def test_another_system(monkeypatch):
    packages(monkeypatch)
    monkeypatch.setattr(support.platform, "machine", lambda: "aarch64")
    assert "Linux on x86-64" in why_not_installed()


def test_asking_imports_no_kernels():
    code = (
        "import json, sys; from codetta.backends.hopper import support; support.why_not(); support.why_not_installed();"
        "print(json.dumps([m for m in ('quack', 'cutlass', 'tvm_ffi', 'triton') if m in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_backends_by_name():
    assert set(BACKENDS) == {"reference", "hopper"}
    assert get_backend("reference").__name__ == "Executable"
    with pytest.raises(SettingsError, match=r"no backend 'cuda'(.|\n)*there are: hopper, reference"):
        get_backend("cuda")


@pytest.mark.parametrize(
    "version, reason",
    [
        ("4.0.0b36", None),
        ("4.0.0b35", "flash-attn-4 4.0.0b35 is not ==4.0.0b36: pip install 'codetta[flash]'"),
        (None, "flash-attn-4 is not installed: pip install 'codetta[flash]'"),
    ],
)
def test_flash_attention_is_asked_for_apart(version, reason, monkeypatch):
    """Kernels run without it."""
    packages(monkeypatch, flash_attn_4=version)
    assert why_not_flash() == reason
    assert why_not_installed() is None
