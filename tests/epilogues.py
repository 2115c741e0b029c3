"""Epilogues of every kind that one kernel does, each beside a plain PyTorch expression in float64 of what it means."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.reference.evaluate import TORCH
from codetta.core.node import substitute
from codetta.core.types import bf16, tile
from codetta.ir.build import input_, matmul
from codetta.ir.graph import Graph
from codetta.ir.program import Program, param_name
from codetta.lang.source import parse_program
from codetta.partition.plan import Plan
from codetta.partition.training import plan_training

ROWS = 37
K = 64


def program(body: str, params: str, k: int = 64, form: str = "nt") -> Program:
    """An epilogue behind a bf16 GEMM."""
    return parse_program(f'@epilogue(gemm="{form}", k={k}, dtype=bf16)\ndef p(acc: {params}):\n    {body}\n')


def inputs(p: Program, seed: int = 0, rows: int = ROWS) -> list[Tensor]:
    """Random values of the parameters, the accumulator's among them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in p.params:
        sizes = [d if isinstance(d, int) else rows for d in (n.type.rows, n.type.cols) if d is not None]
        if n.type.dtype.is_float:
            found.append(torch.randn(sizes, generator=generator, dtype=torch.float64))
        else:
            found.append(torch.randint(-3, 60, sizes, generator=generator))
    return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Hugging Face's RoPE, as transformers writes it."""
    x = x.unflatten(1, (heads, -1))
    a, b = x.chunk(2, -1)
    turned = torch.cat([-b, a], -1)
    return (x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).flatten(1)


def rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Meta's RoPE: adjacent columns are a complex number, multiplied by another."""
    pairs = torch.view_as_complex(x.unflatten(1, (heads, -1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sin).unsqueeze(1)).flatten(1)


def head_norm(x: Tensor, gain: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Each head over its root mean square, and the reciprocal of that."""
    y = x.unflatten(1, (heads, -1))
    r = (y.square().mean(2) + 1e-6).rsqrt()
    return (y * r.unsqueeze(2)).flatten(1) * gain, r


def qk_norm(acc: Tensor, r: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    t = acc * r[:, None]
    (q, rq), (k, rk) = head_norm(t[:, :256], qw, 4), head_norm(t[:, 256:384], kw, 2)
    return t[:, 384:], rotate(q, cos, sin, 4), rotate(k, cos, sin, 2), t, rq, rk


def qkv_bias(
    acc: Tensor, r: Tensor, qb: Tensor, kb: Tensor, vb: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    q, k, v = (acc * r[:, None] + torch.cat([qb, kb, vb])).split([256, 128, 128], 1)
    return v, rotate(q, cos, sin, 4), rotate(k, cos, sin, 2)


def swiglu_backward(acc: Tensor, z: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    z = z.clone().requires_grad_()
    gate, up = z.chunk(2, 1)
    y = F.silu(gate) * up
    (dz,) = torch.autograd.grad(y, z, acc)
    return dz * r[:, None], (dz * z.detach()).sum(1), y.detach()


def murmur(seed: Tensor, rows: int, cols: int) -> Tensor:
    """MurmurHash3's finaliser over seed, row and column, as numbers in [0, 1) of 24 bits."""
    h = torch.tensor(0x9E3779B9)
    for counter in (seed, torch.arange(rows)[:, None], torch.arange(cols)):
        h = (h + counter * 0x9E3779B1) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ (h >> shift)) * factor % 2**32
        h = h ^ (h >> 16)
    return (h >> 8) / 2**24


Expected = Callable[..., tuple[Tensor, ...]]
CASES: dict[str, tuple[Program, Expected]] = {
    "residual_rms": (
        program(
            "t = x + acc\n    return dict(h=to(t * g, bf16), t=to(t, bf16), s=sum_row(t * t))",
            "Tile[264, f32], x: Tile[264, bf16], g: RowVec[264, f32]",
        ),
        lambda acc, x, g: ((x + acc) * g, x + acc, (x + acc).square().sum(1)),
    ),
    "swiglu": (
        program(
            "z = acc * r\n    a, b = halves(z)\n    return dict(y=to(silu(a) * b, bf16), z=to(z, bf16))",
            "Tile[192, f32], r: ColVec[f32]",
        ),
        lambda acc, r: (F.silu(acc[:, :96] * r[:, None]) * acc[:, 96:] * r[:, None], acc * r[:, None]),
    ),
    "qkv_rope": (
        program(
            "t = acc * r\n    q, k, v = columns(t, 256, 128, 128)\n    a, b = halves(q, groups=4)\n"
            "    c, d = halves(k, groups=2)\n    e, f = halves(cos_)\n    g, h = halves(sin_)\n"
            "    return dict(v=to(v, bf16), q=to(join_halves(a * e - b * g, b * f + a * h, groups=4), bf16),\n"
            "                k=to(join_halves(c * e - d * g, d * f + c * h, groups=2), bf16))",
            "Tile[512, f32], r: ColVec[f32], cos_: Table[64, bf16], sin_: Table[64, bf16]",
        ),
        lambda acc, r, cos, sin: (
            acc[:, 384:] * r[:, None],
            rotate(acc[:, :256] * r[:, None], cos, sin, 4),
            rotate(acc[:, 256:384] * r[:, None], cos, sin, 2),
        ),
    ),
    "swiglu_backward": (
        program(
            "a, b = halves(z)\n    s = sigmoid(a)\n    da = acc * b * (s * (1.0 + a * (1.0 - s)))\n"
            "    db = acc * silu(a)\n    dz = to(join_halves(da, db) * r, bf16)\n"
            "    return dict(dz=dz, s=sum_row(da * a + db * b), y=to(silu(a) * b, bf16))",
            "Tile[96, f32], z: Tile[192, bf16], r: ColVec[f32]",
            form="nn",
        ),
        swiglu_backward,
    ),
    "norm_backward": (
        program(
            "return dict(dx=to(d + x * c + acc * g, bf16), s=sum_col(acc * x))",
            "Tile[72, f32], d: Tile[72, bf16], x: Tile[72, bf16], c: ColVec[f32], g: RowVec[72, bf16]",
            form="nn",
        ),
        lambda acc, d, x, c, g: (d + x * c[:, None] + acc * g, (acc * x).sum(0)),
    ),
    "loss": (
        program(
            "y = acc * r\n    return dict(y=to(y, f32), lse=logsumexp_row(y), at=select_column(y, target))",
            "Tile[40, f32], r: ColVec[f32], target: ColVec[i64]",
        ),
        lambda acc, r, target: (
            acc * r[:, None],
            (acc * r[:, None]).logsumexp(1),
            torch.where(
                (target >= 0) & (target < 40), (acc * r[:, None]).gather(1, target.clamp(0, 39)[:, None])[:, 0], 0.0
            ),
        ),
    ),
    "loss_without_logits": (
        program(
            "return dict(lse=logsumexp_row(acc), at=select_column(acc, target), s=sum_row(acc * 0.5))",
            "Tile[40, f32], target: ColVec[i32]",
        ),
        lambda acc, target: (
            acc.logsumexp(1),
            torch.where((target >= 0) & (target < 40), acc.gather(1, target.clamp(0, 39)[:, None].long())[:, 0], 0.0),
            acc.sum(1) * 0.5,
        ),
    ),
    "logits_gradient": (
        program(
            "hit = where(column_index(40) == target, 1.0, 0.0)\n    d = g * exp(acc - lse) + hit * h\n"
            "    return dict(d=to(d, bf16), b=sum_col(d))",
            "Tile[40, f32], target: ColVec[i32], g: ColVec[f32], lse: ColVec[f32], h: ColVec[f32]",
        ),
        lambda acc, target, g, lse, h: (
            d := g[:, None] * (acc - lse[:, None]).exp() + (torch.arange(40) == target[:, None]) * h[:, None],
            d.sum(0),
        ),
    ),
    "bias_gelu_max": (
        program(
            "z = acc * s + b\n    return dict(z=to(z, bf16), y=to(gelu_tanh(z), bf16), m=absmax_row(z))",
            "Tile[80, f32], b: RowVec[80, bf16], s: Scalar[f32]",
        ),
        lambda acc, b, s: (
            acc * s + b,
            F.gelu(acc * s + b, approximate="tanh"),
            (acc * s + b).abs().amax(1),
        ),
    ),
    "qkv_bias_rope": (
        program(
            "t = acc * r + join_columns(qb, kb, vb)\n    q, k, v = columns(t, 256, 128, 128)\n"
            "    a, b = halves(q, groups=4)\n    c, d = halves(k, groups=2)\n    e, f = halves(cos_)\n"
            "    g, h = halves(sin_)\n"
            "    return dict(v=to(v, bf16), q=to(join_halves(a * e - b * g, b * f + a * h, groups=4), bf16),\n"
            "                k=to(join_halves(c * e - d * g, d * f + c * h, groups=2), bf16))",
            "Tile[512, f32], r: ColVec[f32], qb: RowVec[256, bf16], kb: RowVec[128, bf16], vb: RowVec[128, bf16], "
            "cos_: Table[64, bf16], sin_: Table[64, bf16]",
        ),
        qkv_bias,
    ),
    "qk_norm_rope": (
        program(
            "t = acc * r\n    q, k, v = columns(t, 256, 128, 128)\n"
            "    rq = rsqrt(sum_inside(q * q, groups=4) * 0.015625 + 1e-06)\n"
            "    rk = rsqrt(sum_inside(k * k, groups=2) * 0.015625 + 1e-06)\n"
            "    a, b = halves(q * rq * qw, groups=4)\n    c, d = halves(k * rk * kw, groups=2)\n"
            "    e, f = halves(cos_)\n    g, h = halves(sin_)\n"
            "    return dict(v=to(v, bf16), q=to(join_halves(a * e - b * g, b * f + a * h, groups=4), bf16),\n"
            "                k=to(join_halves(c * e - d * g, d * f + c * h, groups=2), bf16),\n"
            "                t=to(t, bf16), rq=rq, rk=rk)",
            "Tile[512, f32], r: ColVec[f32], qw: RowVec[256, bf16], kw: RowVec[128, f32], cos_: Table[64, bf16], "
            "sin_: Table[64, bf16]",
        ),
        qk_norm,
    ),
    "adjacent_rope": (
        program(
            "t = acc * r + b\n    q, v = columns(t, 384, 128)\n    a, c = adjacent(q)\n"
            "    return dict(q=to(join_adjacent(a * e - c * f, c * e + a * f), bf16), v=to(v, bf16))",
            "Tile[512, f32], r: ColVec[f32], b: RowVec[512, bf16], e: Table[32, f32], f: Table[32, f32]",
        ),
        lambda acc, r, b, e, f: (
            rotate_adjacent((acc * r[:, None] + b)[:, :384], e, f, 6),
            (acc * r[:, None] + b)[:, 384:],
        ),
    ),
    "dropout": (
        program(
            "kept = random(seed, row_index(acc), column_index(acc)) >= 0.25\n"
            "    return dict(y=to(x + where(kept, acc * 1.5, 0.0), bf16), s=sum_col(where(kept, acc, 0.0)))",
            "Tile[264, f32], x: Tile[264, bf16], seed: Scalar[i64]",
        ),
        lambda acc, x, seed: (
            x + acc * 1.5 * (murmur(seed, *acc.shape) >= 0.25),
            (acc * (murmur(seed, *acc.shape) >= 0.25)).sum(0),
        ),
    ),
    "group_scale": (
        program("return dict(y=to(acc * s, bf16))", "Tile[512, f32], s: GroupVec[4, f32]"),
        lambda acc, s: (acc * s.repeat_interleave(128, 1),),
    ),
    "group_scale_of_a_range": (
        program(
            "a, b = columns(acc, 384, 128)\n    return dict(y=to(a * s, bf16), z=to(b, f32))",
            "Tile[512, f32], s: GroupVec[6, f32]",
        ),
        lambda acc, s: (acc[:, :384] * s.repeat_interleave(64, 1), acc[:, 384:]),
    ),
    "amax_of_groups": (
        program(
            "m = absmax_inside(acc, groups=4)\n    return dict(y=to(acc * recip(m + 1e-6), bf16), m=m)",
            "Tile[512, f32]",
        ),
        lambda acc: (
            acc / (acc.unflatten(1, (4, -1)).abs().amax(2).repeat_interleave(128, 1) + 1e-6),
            acc.unflatten(1, (4, -1)).abs().amax(2),
        ),
    ),
    "narrow_scalar": (
        program("return dict(y=to(acc * s, bf16))", "Tile[64, f32], s: Scalar[bf16]"),
        lambda acc, s: (acc * s,),
    ),
    "sums_of_what_padding_is_not": (
        program(
            "t = acc + b\n    u = exp(acc * 0.1)\n"
            "    return dict(y=to(t, bf16), c=sum_col(t), m=absmax_col(t), r=sum_row(u), p=sum_col(t * u))",
            "Tile[264, f32], b: RowVec[264, f32]",
        ),
        lambda acc, b: (
            acc + b,
            (acc + b).sum(0),
            (acc + b).abs().amax(0),
            (acc * 0.1).exp().sum(1),
            ((acc + b) * (acc * 0.1).exp()).sum(0),
        ),
    ),
    "sums_of_ranges": (
        program(
            "q, k, v = columns(acc, 256, 128, 128)\n"
            "    return dict(t=to(acc, bf16), a=sum_row(q * q), b=max_row(k), c=sum_col(v))",
            "Tile[512, f32]",
        ),
        lambda acc: (acc, acc[:, :256].square().sum(1), acc[:, 256:384].amax(1), acc[:, 384:].sum(0)),
    ),
}


@cache
def plan_of(name: str) -> Plan:
    """The program behind its GEMM, with a step that folds each of its partials."""
    program, _ = CASES[name]
    acc, *params = program.params
    form, cols = program.gemm.form, acc.type.cols
    x, w = input_("left", tile(K, bf16)), input_("right", tile(*((K, bf16, cols) if form == "nt" else (cols, bf16, K))))
    bodies = substitute([n for _, n in program.outputs], {acc: matmul(x, w, form)})
    names = [name for name, _ in program.outputs]
    graph = Graph((x, w, *params), tuple(zip(names, bodies, strict=True)))
    return plan_training(graph, [], as_written=True).forward


def case(name: str, rows: int) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Inputs of the plan, and what its outputs are in float64."""
    program, expected = CASES[name]
    acc, *values = inputs(program, rows, rows)
    values = [v.to(TORCH[n.type.dtype]) for n, v in zip(program.params[1:], values, strict=True)]
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, K, generator=generator).bfloat16()
    w = torch.randn(acc.shape[1], K, generator=generator).mul(K**-0.5).bfloat16()
    wanted = expected(x.double() @ w.double().t(), *(v.double() if v.is_floating_point() else v for v in values))
    stored = w if program.gemm.form == "nt" else w.t().contiguous()
    feed = {"left": x, "right": stored, **{param_name(n): v for n, v in zip(program.params[1:], values, strict=True)}}
    return feed, wanted
