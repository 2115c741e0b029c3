"""A process that compiles kernels: pickled jobs on standard input, a line for each on standard output.

It sees no GPU, so that it takes none of its memory; what it compiles goes to the cache."""

from __future__ import annotations

import pickle
import sys

from codetta.backends.hopper.gemm import compiled


def main() -> None:
    """Compile until the input ends. A failure is told, not raised: whoever asked compiles it again and sees why."""
    answers, sys.stdout = sys.stdout, sys.stderr
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            compiled(job)
            answer = "compiled"
        except Exception as error:
            answer = f"failed: {type(error).__name__}"
        answers.write(answer + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
