"""The text of kernels, and what they need on a GPU: compiled for SM90 without one."""

import pytest
import torch

from codetta.backends.hopper.rows import compile_rows
from codetta.core.types import tile
from codetta.ir import build
from codetta.lang.sizes import with_sizes
from codetta.lang.source import parse_program
from interpreted import run

NORM = """
@leftover
def norm(x: Tile[4096, bf16], w: RowVec[4096, bf16]):
    return dict(h=to(x * w, bf16), r=rsqrt(sum_row(x * x) * 0.000244140625 + 1e-05))
"""
HEAD = """
@leftover
def head(d: Tile[128256, bf16], target: ColVec[i64], n: Scalar[f32], g: Scalar[f32], y: Tile[128256, bf16],
         lse: ColVec[f32], r: ColVec[f32]):
    t1 = where(n > 0.0, g, 0.0) / maximum(n, 1.0)
    t2 = where((target >= 0) & (target < 128256), where(target != -100, t1, 0.0), 0.0)
    t3 = d + -where(column_index(128256) == target, 1.0, 0.0) * t2 + t2 * exp(y - lse)
    return dict(t=to(t3 * r, bf16), c=sum_row(t3 * y) * recip(r))
"""
ROTATED = """
@leftover
def rotated(q: Tile[4096, bf16], k: Tile[1024, bf16], v: Tile[1024, bf16], c: Table[128, bf16], s: Table[128, bf16],
            sq: Tile[4096, bf16], sk: Tile[1024, bf16], sv: Tile[1024, bf16], r: ColVec[f32]):
    a, b = halves(q, groups=32)
    d, e = halves(k, groups=8)
    s1, s2 = halves(s)
    c1, c2 = halves(c)
    t9 = join_halves(b * s2 + a * c1, b * c2 - a * s1, groups=32)
    t10 = join_halves(e * s2 + d * c1, e * c2 - d * s1, groups=8)
    c = (sum_row(v * sv) + sum_row(q * sq) + sum_row(k * sk)) * recip(r)
    return dict(t=to(join_columns(t9, t10, v) * r, bf16), c=c)
"""
GATED = """
@epilogue
def gated(acc: Tile[14336, f32], saved: Tile[28672, bf16], r: ColVec[f32]):
    t1, t2 = halves(saved)
    t3 = sigmoid(t1)
    t4 = acc * t2 * (t3 * (1.0 + t1 * (1.0 - t3)))
    t6 = acc * silu(t1)
    return dict(t=to(join_halves(t4, t6) * r, bf16), sums=sum_row(t4 * t1 + t6 * t2), y=to(silu(t1) * t2, bf16))
"""
GAIN = """
@epilogue
def gain(acc: Tile[4096, f32], x: Tile[4096, bf16], c: ColVec[f32], w: RowVec[4096, bf16]):
    return dict(d=to(x * c + acc * w, bf16), sums=sum_col(acc * x))
"""
LOSS = """
@finalize
def loss(target: ColVec[i64], lse: ColVec[f32], at: ColVec[f32]):
    used = target != -100
    count = sum_all(where(used, 1.0, 0.0))
    return dict(loss=sum_all(where(used, lse - at, 0.0)) / maximum(count, 1.0), lse=lse, count=count)
"""
GROUPS = """
@epilogue
def groups(acc: Tile[4096, f32], w: RowVec[4096, f32], c: Table[128, bf16]):
    a, b = halves(acc * rsqrt(sum_inside(acc * acc, groups=32)) * w, groups=32)
    c1, c2 = halves(c)
    return dict(y=to(join_halves(a * c1 - b * c2, b * c1 + a * c2, groups=32), bf16))
"""

WHOLE = """
@leftover
def whole(x: Tile[8192, bf16], g: Tile[8192, bf16], w: RowVec[8192, bf16]):
    m = sum_row(x) * 0.0001220703125
    y = (x - m) * rsqrt(sum_row((x - m) * (x - m)) * 0.0001220703125 + 1e-05)
    return dict(w=sum_col(g * y), b=sum_col(g), d=to(g * w - y * sum_row(g * w * y), bf16))
"""

LARGE = {
    "whole": WHOLE,
    "norm": NORM,
    "head": HEAD,
    "rotated": ROTATED,
    "gated": GATED,
    "gain": GAIN,
    "loss": LOSS,
    "groups": GROUPS,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_kernel_spills_nothing(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = build.input_("acc", tile(64))
    partial = {"lse": build.logsumexp_row(x)} if name == "loss" else {}
    kernel = compile_rows(parse_program(LARGE[name]), partial)
    assert len(kernel.steps) == 1
    found = kernel.cross_compile()
    assert found.spills == 0
    assert 0 < found.registers <= 128  # two blocks of 256 threads on each multiprocessor, at the least
    assert found.shared <= 32 * 1024


@pytest.mark.parametrize("fn", ["sum", "lse"])
def test_parts_are_loaded_four_at_a_time(fn: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Whatever their number: it is no multiple of four here, and is not compiled for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = build.input_("acc", tile(64))
    reduction = build.sum_row(x) if fn == "sum" else build.logsumexp_row(x)
    p = parse_program("@finalize\ndef f(s: ColVec[f32]):\n    return dict(y=s * 2.0)\n")
    assert compile_rows(p, {"s": reduction}).cross_compile().wide_loads >= (2 if fn == "sum" else 8)


def test_the_interpreter_leaves_the_compiler_as_it_was(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    p = with_sizes(parse_program("@leftover\ndef f(x: Tile[f32]):\n    return dict(y=to(gelu(x), bf16))"), {"N": 48})
    x = torch.randn(2, 48)
    before = compile_rows(p, {}).cross_compile()
    assert run(p, [x], 2)["y"].dtype == torch.bfloat16
    assert compile_rows(p, {}).cross_compile() == before


TEXT = """\
def rows_norm_0(x_ptr, x_ptr_stride, w_ptr, out0_ptr, out1_ptr, rows, span, BM: tl.constexpr, BT: tl.constexpr):
    r = (tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    m1 = (r < rows)
    acc2 = tl.full((BM, 4096), 0, tl.float32)
    k3 = 0 + tl.arange(0, 4096)[None, :]
    p4 = x_ptr + r * x_ptr_stride
    x_5 = tl.load(p4 + k3, mask=m1, other=0)
    t6 = x_5.to(tl.float32)
    t7 = t6 * t6
    acc2 = acc2 + t7
    w_8 = tl.load(w_ptr + k3)
    t9 = w_8.to(tl.float32)
    t10 = t6 * t9
    t11 = t10.to(tl.bfloat16)
    p12 = out0_ptr + r * 4096
    tl.store(p12 + k3, t11, mask=m1)
    t13 = tl.reduce(acc2, 1, add, keep_dims=True)
    t14 = t13
    t15 = t14 * 0.000244140625
    t16 = t15 + 1e-05
    t17 = tl.rsqrt(t16)
    p18 = out1_ptr + r
    tl.store(p18, t17, mask=m1)
"""


def test_the_text_of_a_norm():
    assert compile_rows(parse_program(NORM), {}).text == TEXT


def test_the_same_program_has_the_same_text():
    assert compile_rows(parse_program(ROTATED), {}).text == compile_rows(parse_program(ROTATED), {}).text


def test_offsets_of_rows_have_64_bits():
    assert ".to(tl.int64)[:, None]" in compile_rows(parse_program(HEAD), {}).text
