"""Which configuration a program gets: measured ones first, then a rough model; and which rows are alike."""

from __future__ import annotations

import json

import pytest
from test_tune import BARE, RESIDUAL, program

from codetta.backends.hopper import choose as choosing
from codetta.backends.hopper import table as tables
from codetta.backends.hopper.choose import bare_config, choose, lowered_of, own_kernel
from codetta.backends.hopper.config import BUCKETS, Config, bucket, fits
from codetta.backends.hopper.space import CLUSTERS, SMALL, SWIZZLES, TILES, candidates, neighbours, space
from codetta.backends.hopper.table import Entry, Key, Table, key_of, merged, read, write
from codetta.errors import SettingsError
from codetta.lang.source import parse_program

PAIR = parse_program(
    '@epilogue(gemm="nt", k=4096, dtype=bf16)\ndef p(acc: Tile[8192, f32]):\n    gate, up = halves(acc)\n'
    "    return dict(y=to(silu(gate) * up, bf16), z=to(acc, bf16))\n"
)
OURS, THEIRS = Config(128, 160, pingpong=True, narrow=True, dynamic=True), Config(256, 128, narrow=True)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A user's folder and a shipped one, both empty."""
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path / "cache"))
    choosing.forget()
    yield tables.user_file(tables.this_gpu()), tmp_path / "shipped" / "h200.json"
    choosing.forget()


def put(file, config: Config | None, p=RESIDUAL, rows: int = BUCKETS[-1], gpu: str = "NVIDIA H200") -> None:
    key = key_of(p, lowered_of(p), rows)
    known = read(file) if file.is_file() else None
    write(merged(known, gpu, {key: Entry(config, 1.0, 2.0, "p")}), file)
    choosing.forget()


@pytest.mark.parametrize(
    "rows,found", [(1, 512), (512, 512), (513, 2048), (8192, 8192), (8193, 16_384), (10**6, 16_384)]
)
def test_buckets(rows, found):
    assert bucket(rows) == found


def test_an_unknown_number_of_rows_is_a_training_steps():
    assert bucket(None) == BUCKETS[-1]


def test_what_was_measured_comes_before_the_model(files):
    own, shipped = files
    default = choose(RESIDUAL)[1]
    assert default not in (OURS, THEIRS)
    put(shipped, THEIRS)
    assert choose(RESIDUAL)[1] == THEIRS
    put(own, OURS)
    assert choose(RESIDUAL)[1] == OURS
    own.unlink()
    choosing.forget()
    assert choose(RESIDUAL)[1] == THEIRS


def test_another_gpus_table_is_better_than_none_but_not_than_its_own(files):
    _, shipped = files
    put(shipped.with_name("a100.json"), THEIRS, gpu="another")
    assert choose(RESIDUAL)[1] == THEIRS
    put(shipped, OURS, gpu=tables.this_gpu())
    assert choose(RESIDUAL)[1] == OURS


def test_buckets_have_entries_of_their_own_and_serve_each_other(files):
    _, shipped = files
    put(shipped, THEIRS, rows=16_384)
    put(shipped, OURS, rows=512)
    assert choose(RESIDUAL, 16_384)[1] == choose(RESIDUAL, 8000)[1] == choose(RESIDUAL)[1] == THEIRS
    assert choose(RESIDUAL, 500)[1] == OURS
    assert choose(RESIDUAL, 1000)[1] == OURS  # 2048 is two powers of two from 512, three from 16,384


def test_near_sizes_are_served_far_ones_are_not(files):
    _, shipped = files
    put(shipped, OURS)
    near = program("y=to(acc + x, bf16), s=sum_row((acc + x) * (acc + x))", ", x: Tile[5120, bf16]", n=5120, k=6144)
    far = program("y=to(acc + x, bf16), s=sum_row((acc + x) * (acc + x))", ", x: Tile[512, bf16]", n=512, k=512)
    other = program("y=to(acc * x, bf16)", ", x: Tile[4096, bf16]")
    assert choose(near)[1] == OURS
    assert choose(far)[1] != OURS
    assert choose(other)[1] != OURS


def test_names_and_the_order_of_parameters_do_not_matter():
    a = program("y=to(acc * g + x, bf16)", ", x: Tile[4096, bf16], g: RowVec[4096, bf16]")
    b = program("out=to(r + acc * w, bf16)", ", w: RowVec[4096, bf16], r: Tile[4096, bf16]")
    c = program("out=to(r + acc * sigmoid(w), bf16)", ", w: RowVec[4096, bf16], r: Tile[4096, bf16]")
    keys = [key_of(p, lowered_of(p), 16_384) for p in (a, b, c)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].program == "nt bf16 element: row:bf16 tile:bf16 -> bf16"


def test_an_entry_that_does_not_fit_is_passed_over(files):
    own, _ = files
    put(own, Config(128, 208, pingpong=True), PAIR)
    assert choose(PAIR)[1].tile_n % 32 == 0


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 1, "gpu": "x", "entries": [{"program": "p"}]}', '{"version": 99}']
)
def test_a_broken_table_is_named(files, text):
    own, _ = files
    own.parent.mkdir(parents=True)
    own.write_text(text)
    choosing.forget()
    with pytest.raises(SettingsError, match="no table of configurations"):
        choose(RESIDUAL)


def test_a_table_survives_its_file(tmp_path):
    entries = {
        Key("a", 1, 2, 512): Entry(Config(128, 192, True, True, 1, 2, True, True, 128, 16), 3.1, 4.2, "name"),
        Key("b", 1, 2, 512): Entry(None, 3.0, 3.0, "wgrad"),
    }
    file = tmp_path / "deep" / "t.json"
    write(Table("NVIDIA H200", entries), file)
    assert read(file).entries == entries
    assert [f.name for f in file.parent.iterdir()] == ["t.json"]


def test_a_configuration_with_unknown_fields_is_refused():
    for wrong in ({"tile_m": 128}, {"tile_m": 128, "tile_n": 128, "x": 1}, {"tile_m": True, "tile_n": 128}):
        with pytest.raises(SettingsError, match="no configuration"):
            Config.from_json(wrong)


# --- GEMMs without an epilogue ----------------------------------------------------------------------------------------

WEIGHT_GRADIENT = program("y=to(acc, bf16)", form="tn", n=4096, rows="6144")


@pytest.mark.parametrize("p", [BARE, WEIGHT_GRADIENT], ids=["data", "weight"])
def test_a_bare_gemm_is_the_librarys_until_ours_was_faster(files, p):
    own, _ = files
    assert bare_config(p) is None
    assert not own_kernel(p)
    put(own, OURS, p)
    assert bare_config(p) == OURS
    assert own_kernel(p, 16_000)
    assert choose(p)[1] == OURS
    put(own, None, p)
    assert bare_config(p) is None
    assert fits(lowered_of(p), choose(p)[1])  # one there is, for who wants it


def test_batch_invariance_takes_our_kernel_where_rows_are_tokens(files):
    assert own_kernel(BARE, 100, batch_invariant=True)
    assert not own_kernel(WEIGHT_GRADIENT, 100, batch_invariant=True)


def test_the_key_of_a_weight_gradient_has_its_rows():
    key = key_of(WEIGHT_GRADIENT, lowered_of(WEIGHT_GRADIENT), 3000)
    assert (key.n, key.k, key.rows) == (4096, 6144, 8192)


# --- the model and the space ------------------------------------------------------------------------------------------


def test_small_problems_get_smaller_tiles():
    """128 rows and 4096 columns are 16 tiles of 256 columns, 32 of 128: 132 can work at once."""
    lowered = lowered_of(RESIDUAL)
    few, many = (candidates(lowered, 4096, rows)[0] for rows in (512, 16_384))
    assert few.tile_m * few.tile_n <= many.tile_m * many.tile_n


def test_the_space_is_distinct_fits_and_begins_with_what_is_known():
    for p in (RESIDUAL, BARE, WEIGHT_GRADIENT):
        lowered = lowered_of(p)
        found = space(lowered, 4096)
        assert len(set(found)) == len(found) >= 8
        assert all(fits(lowered, c) for c in found)
        known = candidates(lowered, 4096, BUCKETS[-1])
        assert found[: len(known)] == known
        assert not any(c in neighbours(lowered, c) for c in found)


def test_every_shipped_configuration_is_one_that_tuning_tries():
    for file in sorted(tables.SHIPPED.glob("*.json")):
        shipped = read(file)
        assert file.stem.upper() in shipped.gpu.upper().replace(" ", "")
        for key, entry in shipped.entries.items():
            assert key.rows in BUCKETS
            if entry.config is None:
                assert key.program.split(" -> ")[0].endswith("element:")  # no epilogue: the library's GEMM
                continue
            c = entry.config
            assert (c.tile_m, c.tile_n) in {(t.tile_m, t.tile_n) for t in (*TILES, *SMALL)}
            assert (c.cluster_m, c.cluster_n) in CLUSTERS
            assert c.swizzle in (8, *SWIZZLES)
    assert json.loads(json.dumps(OURS.to_json())) == OURS.to_json()
