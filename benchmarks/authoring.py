"""The experiment of docs/authoring/experiment.md: are the answers right, after how many attempts, and how fast.

python benchmarks/authoring.py check ANSWERS --out out/authoring     # on any machine: every attempt by `codetta check`
python benchmarks/authoring.py time ANSWERS --out out/authoring      # on a Hopper GPU: the last attempts that are right
python benchmarks/authoring.py own FOLDER                            # the compiler's own programs as answers, to try it
python benchmarks/authoring.py table --out out/authoring             # the tables again

Tasks are the files of benchmarks/authoring. ANSWERS holds a folder for each, by its name, with the attempts 1.py, 2.py,
... as they were handed in. Both steps write OUT/authoring.json after every case, and go on where it exists.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import codetta
from codetta.author.bind import compiled_form, real_sizes
from codetta.author.file import load
from codetta.bench.baselines import product_of
from codetta.bench.check import accumulator, checked
from codetta.bench.paper import PROGRAMS, Entry, bound, case, plan_of
from codetta.bench.shapes import SHAPES
from codetta.ir.program import Program
from codetta.lang.source import program_text
from codetta.timing import gemm_filler, measure

TASKS = Path(__file__).parent / "authoring"
SHAPE = SHAPES["paper-4096"]
TIMEOUT, ROUNDS, SECONDS = 600, 25, 4.0
CODETTA = [sys.executable, "-c", "from codetta.cli import main; main()"]


@dataclass(frozen=True)
class Task:
    """One of the paper's programs, as plain PyTorch, with the compiler's own program for it."""

    file: Path
    entry: Entry

    @property
    def key(self) -> str:
        """``01_gemm_rope``, the name of its folder of answers."""
        return self.file.stem

    @property
    def name(self) -> str:
        """``gemm_rope``, the name of the program that is asked for."""
        return self.key.partition("_")[2]

    @property
    def own(self) -> Program:
        """The compiler's own program, at the task's sizes."""
        return replace(bound(self.entry, SHAPE), name=self.name)


def tasks() -> list[Task]:
    """The ten, in order."""
    return [Task(file, entry) for file, entry in zip(sorted(TASKS.glob("*.py")), PROGRAMS, strict=True)]


# --- are they right ---------------------------------------------------------------------------------------------------


def judged(task: Task, file: Path, quick: bool = False) -> dict[str, Any]:
    """What `codetta check` says of an attempt; an answer that changed its task, or is another size, is wrong."""
    changed = changed_task(task, file)
    if changed:
        return {"ok": False, "kind": "TaskChanged", "message": changed}
    command = [*CODETTA, "check", f"{file.resolve()}::{task.name}", "--json", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"ok": False, "kind": "timeout", "message": f"not done in {TIMEOUT} s"}
    try:
        found = json.loads(done.stdout.replace(str(file.resolve()), f"{task.key}/{file.name}"))
    except json.JSONDecodeError:  # codetta itself failed: its last line says how
        return {"ok": False, "kind": "crash", "message": done.stderr.strip().rpartition("\n")[2][:400]}
    if found["error"]:
        return {"ok": False, **found["error"]}
    return _of_program(task, found["programs"][0])


def _of_program(task: Task, program: dict[str, Any]) -> dict[str, Any]:
    wrong = [c for c in program["comparisons"] if not c["ok"]]
    kernels = [k for k in program["kernels"] if k["phase"] == "forward"]
    found = {"ok": program["ok"], "kind": "wrong numbers" if wrong else "", "kernels": kernels}
    found["message"] = "; ".join(f"{c['kind']} of {c['name']}" for c in wrong)
    first = task.own.params[0].type.cols
    if program["ok"] and f"acc: Tile[{first}, f32]" not in program["text"]:
        found |= {"ok": False, "kind": "wrong size", "message": f"it is not compiled at {first} columns"}
    return found


def changed_task(task: Task, file: Path) -> str:
    """What of the task's code an answer lacks: its reference must stand as it was given. Sizes may be written anew."""
    try:
        answer = {ast.dump(n) for n in ast.parse(file.read_text(encoding="utf-8")).body}
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"no Python: {error}"
    given = [n for n in ast.parse(task.file.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
    missing = [n.name for n in given if ast.dump(n) not in answer]
    return f"{', '.join(missing)} is not as it was given" if missing else ""


def check_all(answers: Path, out: Path, quick: bool) -> None:
    """Judge every attempt that has not been judged."""
    found = read(out)
    for task in tasks():
        row = found.setdefault(task.key, {"attempts": []})
        files = sorted((answers / task.key).glob("*.py"), key=lambda f: int(f.stem) if f.stem.isdigit() else 0)
        for file in files[len(row["attempts"]) :]:
            row["attempts"].append({"file": f"{task.key}/{file.name}", **judged(task, file, quick)})
            write(out, found)
            print(f"{task.key}/{file.name}: {row['attempts'][-1]['kind'] or 'right'}", flush=True)


# --- how fast are they ------------------------------------------------------------------------------------------------


def time_all(answers: Path, out: Path) -> None:
    """Time the last attempt of each task, if it is right, beside the compiler's own program and the bare GEMM."""
    found, filler = read(out), gemm_filler()
    for task in tasks():
        row = found.get(task.key, {"attempts": []})
        if "times" in row or not row["attempts"] or not row["attempts"][-1]["ok"]:
            continue
        try:
            row["times"] = _times(task, answers / row["attempts"][-1]["file"], filler)
        except Exception as error:  # any: told, and the next is timed
            row["times"] = {"error": f"{type(error).__name__}: {error}"[:400]}
        write(out, found)
        print(f"{task.key}: {row['times']}", flush=True)
        torch.cuda.empty_cache()


def _times(task: Task, file: Path, filler: Any) -> dict[str, Any]:
    """Microseconds of all three, measured in turns, and the paired ratios."""
    (authored,) = load(f"{file}::{task.name}")
    answer = compiled_form(authored.program, real_sizes(authored.program, authored.sizes))
    cases = {
        name: case(task.entry, SHAPE, plan_of(p), "cuda", "hopper")
        for name, p in {"answer": answer, "own": task.own}.items()
    }
    variants: dict[str, Any] = {name: c.runner() for name, c in cases.items()}
    errors = {f"{name}_error": checked(c, variants[name], accumulator(c)) for name, c in cases.items()}
    variants["bare"] = product_of(cases["own"])
    timings = measure(variants, rounds=ROUNDS, filler=filler, budget=SECONDS)
    ratios = {
        "answer_over_own": timings["answer"].over(timings["own"]),
        "answer_over_bare": timings["answer"].over(timings["bare"]),
        "own_over_bare": timings["own"].over(timings["bare"]),
    }
    return {
        **{f"{name}_us": t.median for name, t in timings.items()},
        **ratios,
        **errors,
        "gpu": torch.cuda.get_device_name(),
    }


# --- telling ----------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """The two tables of docs/authoring/experiment.md."""
    lines = [
        "| task | attempts | right | one kernel | spills | us | over own | over bare |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, row in found.items():
        lines.append("| " + " | ".join([key, *_cells(row)]) + " |")
    tried = [row["attempts"] for row in found.values() if row["attempts"]]
    first = sum(a[0]["ok"] for a in tried)
    right = sum(any(x["ok"] for x in a) for a in tried)
    lines += ["", f"Right at the first attempt: {first} of {len(tried)}; right at last: {right} of {len(tried)}.", ""]
    mistakes = Counter(x["kind"] for a in tried for x in a if not x["ok"])
    lines += ["| mistake | times |", "|---|---|", *(f"| {kind} | {n} |" for kind, n in mistakes.most_common())]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    attempts, times = row["attempts"], row.get("times", {})
    if not attempts:
        return ["0", *([""] * 6)]
    last = attempts[-1]
    kernel: dict[str, Any] = next(iter(last.get("kernels", [])), {})
    fused = {"kernel": "yes"}.get(kernel.get("kind", ""), kernel.get("reason", ""))
    numbers = [
        f"{times[n]:{f}}" if n in times else ""
        for n, f in (("answer_us", ",.0f"), ("answer_over_own", ".3f"), ("answer_over_bare", ".3f"))
    ]
    spills = str(kernel["spill_stores"]) if kernel.get("spill_stores") is not None else ""
    return [str(len(attempts)), "yes" if last["ok"] else last["kind"], fused, spills, *numbers]


def read(out: Path) -> dict[str, Any]:
    """What was found so far."""
    file = out / "authoring.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def write(out: Path, found: dict[str, Any]) -> None:
    """Keep it, and the tables beside it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "authoring.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    (out / "authoring.md").write_text(table(found), encoding="utf-8")


def write_own(folder: Path) -> None:
    """The compiler's own programs as first attempts."""
    for task in tasks():
        text = program_text(task.own)
        names = sorted(set(codetta.__all__) & set(re.findall(r"\w+", text)))
        file = folder / task.key / "1.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        body = task.file.read_text(encoding="utf-8")
        sizes = f'{task.name}_SIZES = {{"M": {SHAPE.tokens}}}\n'  # the others are numbers in its text
        file.write_text(f"from codetta import {', '.join(names)}\n\n{text}\n\n{body}{sizes}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "time", "own", "table"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--out", type=Path, default=Path("out/authoring"))
    parser.add_argument("--quick", action="store_true", help="compare numbers only")
    given = parser.parse_args()
    if given.what == "own":
        write_own(given.folder)
    elif given.what == "check":
        check_all(given.folder, given.out, given.quick)
    elif given.what == "time":
        time_all(given.folder, given.out)
    if given.what != "own":
        print(table(read(given.out)))


if __name__ == "__main__":
    main()
