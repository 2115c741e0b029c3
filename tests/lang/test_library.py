"""Ready epilogues print in a few lines, come back from their text, and compute what PyTorch computes in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.reference.evaluate import evaluate
from codetta.lang import library
from codetta.lang.sizes import with_sizes
from codetta.lang.source import parse_program, program_text
from codetta.lang.trace import Epilogue

READY: list[Epilogue] = [
    library.residual_rms,
    library.rms_scale(4096),
    library.scaled_swiglu,
    library.geglu,
    library.rope_halves(32),
    library.rope_adjacent,
    library.bias_gelu,
    library.dropout(0.1),
    library.lse_select,
    library.row_amax,
    library.qk_norm(32, 128),
]


@pytest.mark.parametrize("ready", READY, ids=lambda e: e.program.name)
def test_text_traces_back(ready: Epilogue):
    text = program_text(ready.program)
    assert parse_program(text) == ready.program
    assert ready.__doc__ or ready.fn.__doc__ is None
    assert len(text.splitlines()) <= 8


def test_every_ready_epilogue_is_tested():
    public = {n for n, v in vars(library).items() if getattr(v, "__module__", "") == library.__name__}
    assert public - {"Outputs"} == {e.program.name for e in READY}


def test_how_they_read():
    assert program_text(library.scaled_swiglu.program) == (
        "@epilogue\n"
        'def scaled_swiglu(acc: Tile["2*N", f32], rstd: ColVec[f32]):\n'
        "    z = acc * rstd\n"
        "    t1, t2 = halves(z)\n"
        "    return dict(z=z, y=silu(t1) * t2)\n"
    )
    assert program_text(library.rope_halves(32).program) == (
        "@epilogue\n"
        'def rope_halves(acc: Tile["N", f32], c: Table["I", f32], s: Table["I", f32]):\n'
        "    t1, t2 = halves(acc, groups=32)\n"
        "    return dict(y=join_halves(t1 * c - t2 * s, t2 * c + t1 * s, groups=32))\n"
    )


# --- numbers ----------------------------------------------------------------------------------------------------------

M, N, HEADS, WIDTH = 5, 24, 3, 8
RANDOM = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM)


def run(ready: Epilogue, sizes: dict[str, int], *params: Tensor) -> list[Tensor]:
    program = with_sizes(ready.program, sizes)
    return evaluate([n for _, n in program.outputs], dict(zip(program.params, params, strict=True)))


def check(found: list[Tensor], *expected: Tensor) -> None:
    """Float32 arithmetic against float64."""
    for a, b in zip(found, expected, strict=True):
        assert b.dtype is torch.float64
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-6)


ACC, X, GAIN = normal(M, N), normal(M, N), 1 + normal(N)
C, S = normal(M, WIDTH // 2), normal(M, WIDTH // 2)


def test_residual_rms():
    x = ACC.double() + X.double()
    found = run(library.residual_rms, {"N": N}, ACC, X, GAIN)
    check(found, x, x * GAIN.double(), x.square().sum(1))
    rstd = run(library.rms_scale(N, eps=1e-5), {}, found[2])
    check([found[1] * rstd[0][:, None]], F.rms_norm(x, (N,), GAIN.double(), eps=1e-5))


def test_gated():
    scale = normal(M)
    z = ACC.double() * scale.double()[:, None]
    check(run(library.scaled_swiglu, {"N": N // 2}, ACC, scale), z, F.silu(z[:, : N // 2]) * z[:, N // 2 :])
    gate, up = ACC.double().chunk(2, 1)
    check(run(library.geglu, {"N": N // 2}, ACC), ACC.double(), F.gelu(gate, approximate="tanh") * up)


def test_rope_halves():
    """As in Hugging Face: x cos + rotate_half(x) sin, on (M, heads, width) with full-width tables."""
    x = ACC.double().view(M, HEADS, WIDTH)
    c, s = (t.double().repeat(1, 2)[:, None] for t in (C, S))
    rotated = torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1)
    check(run(library.rope_halves(HEADS), {"N": N, "I": WIDTH // 2}, ACC, C, S), (x * c + rotated * s).view(M, N))


def test_rope_adjacent():
    """As in Meta's code: a product of complex numbers."""
    x = torch.view_as_complex(ACC.double().view(M, HEADS, WIDTH // 2, 2))
    turned = x * torch.complex(C.double(), S.double())[:, None]
    check(run(library.rope_adjacent, {"N": N, "I": WIDTH // 2}, ACC, C, S), torch.view_as_real(turned).reshape(M, N))


def test_bias_gelu():
    z = ACC.double() + GAIN.double()
    check(run(library.bias_gelu, {"N": N}, ACC, GAIN), z, F.gelu(z))


def test_dropout():
    p, wide = 0.25, normal(200, 300).abs() + 1
    (y,) = run(library.dropout(p), {"N": 300, "M": 200}, wide, torch.tensor(7))
    (again,) = run(library.dropout(p), {"N": 300, "M": 200}, wide, torch.tensor(7))
    (other,) = run(library.dropout(p), {"N": 300, "M": 200}, wide, torch.tensor(8))
    kept = y != 0
    check([y], torch.where(kept, wide.double() / (1 - p), 0.0))
    assert torch.equal(y, again)
    assert not torch.equal(kept, other != 0)
    assert abs(kept.double().mean() - (1 - p)) < 4 * (p * (1 - p) / wide.numel()) ** 0.5


def test_lse_select():
    target = torch.tensor([3, 0, N - 1, 7, 7])
    lse, picked = run(library.lse_select, {"N": N}, ACC, target)
    loss = F.cross_entropy(ACC.double(), target, reduction="none")
    check([lse, lse - picked], ACC.double().logsumexp(1), loss)


def test_row_amax():
    check(run(library.row_amax, {"N": N}, ACC), ACC.double(), ACC.double().abs().amax(1))


def test_qk_norm():
    x = ACC.double().view(M, HEADS, WIDTH)
    rstd = (x.square().mean(-1) + 1e-5).rsqrt()
    y = (x * rstd[..., None]).view(M, N) * GAIN.double()
    check(run(library.qk_norm(HEADS, WIDTH, eps=1e-5), {"N": N}, ACC, GAIN), y, rstd)
