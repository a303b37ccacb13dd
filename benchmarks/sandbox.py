"""Programs a second through the verifier `code`, by form of tests: python benchmarks/sandbox.py [--seconds 5] [--workers 2]"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from lockstep.config import schema
from lockstep.types import Prompt
from lockstep.verifiers.build import build_verifier
from lockstep.verifiers.code import Code

FORMS = {
    "3 calls": ([{"function": "f", "args": [n], "expected": n * n} for n in range(3)], "def f(n): return n * n"),
    "3 asserts": ([f"assert f({n}) == {n * n}" for n in range(3)], "def f(n): return n * n"),
    "1 script": ([{"input": "3", "output": "9"}], "print(int(input()) ** 2)"),
    "3 scripts": ([{"input": str(n), "output": str(n * n)} for n in range(3)], "print(int(input()) ** 2)"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    start = time.perf_counter()
    verifier = build_verifier(schema.CodeVerifier(workers=options.workers))
    assert isinstance(verifier, Code)
    print(f"ready in {time.perf_counter() - start:.1f} s; {verifier.notes[0]}")
    for name, (tests, program) in FORMS.items():
        prompt = Prompt("bench", ({"role": "user", "content": ""},), "", data={"tests": tests})
        reply = f"```python\n{program}\n```"

        def grade(_: int, prompt: Prompt = prompt, reply: str = reply) -> float:
            begun = time.perf_counter()
            assert verifier.grade(prompt, reply).reward == 1
            return time.perf_counter() - begun

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(grade, range(2 * options.workers)))  # each worker is up
            start, took = time.perf_counter(), []
            while time.perf_counter() - start < options.seconds:
                took += pool.map(grade, range(10))
            wall = time.perf_counter() - start
        took.sort()
        median = took[len(took) // 2]
        print(
            f"{name:10} {len(took) / wall:6.1f} programs/s, median {1e3 * median:.1f} ms, slowest {1e3 * took[-1]:.0f} ms"
        )
    verifier.pool.close()


if __name__ == "__main__":
    main()
