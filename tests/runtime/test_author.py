"""What an author gets: an epilogue's values, and its derived backward programs, printed and run."""

import pytest
import torch

from codetta.errors import ShapeError, UnsupportedError
from codetta.lang.library import residual_rms
from codetta.lang.source import parse_program, program_text
from codetta.runtime.author import run

M, K, N = 9, 5, 12


def values() -> dict[str, torch.Tensor]:
    shapes = {"acc": (M, N), "residual": (M, N), "gain": (N,), "d_x": (M, N), "d_h": (M, N), "d_ssq": (M,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def test_run_gives_the_outputs_with_reductions_folded():
    v, a, w = values(), torch.randn(M, K), torch.randn(N, K)
    found = residual_rms.run(a, w, residual=v["residual"].float(), gain=v["gain"].float())
    x = a.double() @ w.double().T + v["residual"].float().double()
    torch.testing.assert_close(found["x"].double(), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["h"].double(), x * v["gain"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["ssq"].double(), (x * x).sum(1), rtol=1e-5, atol=1e-5)


def test_the_derived_epilogue_gives_autograds_gradients():
    v = values()
    acc, residual, gain = (v[n].clone().requires_grad_() for n in ("acc", "residual", "gain"))
    x = acc + residual
    outputs = (x, x * gain, (x * x).sum(1))
    expected = torch.autograd.grad(outputs, (acc, gain), (v["d_x"], v["d_h"], v["d_ssq"]))
    derived = residual_rms.vjp("h")
    epilogue, finalize, dgrad, wgrad = derived
    assert (dgrad.gemm.form, wgrad.gemm.form) == ("nn", "tn")
    names = {str(p.attrs[0]) for p in epilogue.params}
    feed = {"acc": v["d_h"], "saved_x": x.detach(), "d_x": v["d_x"], "d_ssq": v["d_ssq"], "gain": v["gain"]}
    assert names == set(feed)
    found = run(epilogue, **{name: t.float() for name, t in feed.items()})
    torch.testing.assert_close(found["d_residual"].double(), expected[0], rtol=1e-4, atol=1e-5)
    (folded,) = [t for name, t in found.items() if name != "d_residual"]
    (given,) = finalize.params
    (d_gain,) = run(finalize, **{str(given.attrs[0]): folded}).values()
    torch.testing.assert_close(d_gain.double(), expected[1], rtol=1e-4, atol=1e-5)
    for program in derived:
        assert parse_program(program_text(program)) == program
        assert program_text(program).rstrip() in str(derived)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UnsupportedError, match="stores no Tile 'ssq'"):
        residual_rms.vjp("ssq")
    with pytest.raises(ShapeError, match=r"missing \['gain'\]"):
        residual_rms.run(torch.randn(M, K), torch.randn(N, K), residual=torch.randn(M, N))
    with pytest.raises(ShapeError, match="N is 11 here, but N is 12"):
        residual_rms.run(acc=torch.randn(M, N), residual=torch.randn(M, 11), gain=torch.randn(N))
