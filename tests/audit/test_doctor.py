"""The diagnosis: what is installed, what is wanted, and what can run."""

from io import StringIO
from types import SimpleNamespace

import torch
from rich.console import Console

from codetta.audit import doctor
from codetta.audit.doctor import Device, diagnose
from codetta.backends.hopper import support, table


def test_this_machine():
    found = diagnose()
    packages = {p.name: p for p in found.packages}
    assert packages["torch"].version
    assert packages["torch"].wanted == "<2.15,>=2.11"
    assert not packages["torch"].problem
    assert packages["quack-kernels"].extra == "hopper"
    targets = {t.name: t for t in found.targets}
    assert targets["reference backend"].runs
    assert targets["hopper backend"].runs == any(not d.why_not for d in found.gpus)
    assert targets["hopper backend"].reason
    assert found.gpus or found.no_gpu


def test_a_conflict_is_told(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.0" if name == "torch" else "9.9")
    found = next(p for p in diagnose().packages if p.name == "torch")
    assert found.problem == "1.0 is not >=2.11"


def printed() -> str:
    console = Console(file=StringIO(), width=200)
    with console.capture() as text:
        console.print(diagnose())
    return text.get()


def distributions(monkeypatch, *found: tuple[str, str, list[str]]) -> None:
    """Pretend that these are all the packages that ask for others."""
    there = [SimpleNamespace(name=name, version=version, requires=lines) for name, version, lines in found]
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: there)


def test_packages_that_pin_others(monkeypatch):
    """What an extra of theirs asks for is not installed with them; what allows our version is no conflict."""
    distributions(
        monkeypatch,
        ("vllm", "0.20.0", ["nvidia_cutlass_dsl[cu13] == 4.4.2; platform_machine == 'x86_64'", "torch==2.11.0"]),
        ("flashinfer-python", "0.7", ["apache-tvm-ffi!=0.1.8,<0.1.10,>=0.1.6", "nvidia-cutlass-dsl>=4.3"]),
        ("other", "1", ["nvidia-cutlass-dsl==4.0.0; extra == 'old'"]),
        ("nothing", "1", None),
    )
    found = diagnose().conflicts
    assert [(c.package, c.asks_for, c.kernels_need) for c in found] == [
        ("flashinfer-python 0.7", "apache-tvm-ffi!=0.1.8,<0.1.10,>=0.1.6", "apache-tvm-ffi==0.1.15.post2"),
        ("vllm 0.20.0", "nvidia-cutlass-dsl== 4.4.2", "nvidia-cutlass-dsl==4.8.1"),
    ]
    assert "vllm 0.20.0 asks for nvidia-cutlass-dsl== 4.4.2, the kernels need nvidia-cutlass-dsl==4.8.1" in printed()


def test_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path / "new"))
    assert (diagnose().cache.files, diagnose().cache.bytes) == (0, 0)
    (tmp_path / "new" / "kernels").mkdir(parents=True)
    (tmp_path / "new" / "kernels" / "a.o").write_bytes(b"x" * 1000)
    found = diagnose().cache
    assert (found.path, found.files, found.bytes) == (str(tmp_path / "new"), 1, 1000)
    assert f"kernel cache: {tmp_path / 'new'}, 1 files, 0.0 MB" in printed()


def test_gpus(monkeypatch):
    """One that kernels run on and one that they do not: each says so."""
    properties = [SimpleNamespace(name=n, major=m, minor=0) for n, m in (("NVIDIA H200", 9), ("NVIDIA A100", 8))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
    monkeypatch.setattr(doctor, "why_not", lambda i: "it is too old" if i else None)
    found = diagnose()
    assert found.gpus == (Device("NVIDIA H200", "9.0", ""), Device("NVIDIA A100", "8.0", "it is too old"))
    targets = {t.name: t for t in found.targets}
    assert (targets["hopper backend"].runs, targets["hopper backend"].reason) == (True, "kernels on NVIDIA H200")
    assert "NVIDIA A100" in targets["Inductor on the GPU"].reason
    assert "GPU: NVIDIA A100, capability 8.0, no kernels: it is too old" in printed()


def test_a_source_tree_knows_its_pins(monkeypatch):
    def absent(name: str) -> list[str]:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    packages = {p.name: p for p in diagnose().packages}
    pins = *support.PINS, support.FLASH
    assert {p.name: p.versions for p in pins} == {p.name: packages[p.name].wanted for p in pins}


def test_the_tables_that_serve_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path))
    own = table.user_file(table.this_gpu())
    key = table.Key("nt bf16 element: -> bf16", 4096, 4096, 512)
    table.write(table.Table("NVIDIA H200", {key: table.Entry(None)}), own)
    table.tables.cache_clear()
    try:
        assert f"1 measured on NVIDIA H200, {own}" in diagnose().tuned
        own.write_text("broken")
        table.tables.cache_clear()
        assert any("no table of configurations" in line for line in diagnose().tuned)
    finally:
        table.tables.cache_clear()
