"""The diagnosis: what is installed, what is wanted, and what can run."""

import pytest

from codetta.audit import doctor
from codetta.audit.doctor import diagnose, why_not_version


@pytest.mark.parametrize(
    "version, wanted",
    [
        ("2.13.0+cpu", ">=2.11,<2.15"),
        ("0.6.5", "==0.6.5"),
        ("0.1.15.post2", "==0.1.15.post2"),
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
    ],
)
def test_versions_that_do_not_fit(version, wanted, reason):
    assert why_not_version(version, wanted) == reason


def test_this_machine():
    found = diagnose()
    packages = {p.name: p for p in found.packages}
    assert packages["torch"].version
    assert packages["torch"].wanted == "<2.15,>=2.11"
    assert not packages["torch"].problem
    assert packages["quack-kernels"].extra == "hopper"
    targets = {t.name: t for t in found.targets}
    assert targets["reference backend"].runs
    assert not targets["hopper backend"].runs
    assert "not part of this version" in targets["hopper backend"].reason
    assert found.gpus or found.no_gpu


def test_a_conflict_is_told(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.0" if name == "torch" else "9.9")
    torch = next(p for p in diagnose().packages if p.name == "torch")
    assert torch.problem == "1.0 is not >=2.11"
