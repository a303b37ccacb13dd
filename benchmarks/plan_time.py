"""Is the time that `lockstep plan --time` gives the time that a run takes? Measures both, one after the other.

    python benchmarks/plan_time.py quickstart steps=6 eval.every=6 eval.items=16

The limit is 25 % for the run from its first step to its last, evaluations and checkpoints included. Another program that takes
the processor during one of the two shows as a difference; with --cpu first, both count the processor's seconds of this process
alone (with OMP_NUM_THREADS=1 these are the seconds of a machine with nothing else to do).
"""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

LIMIT = 0.25


def main(words: list[str]) -> int:
    if words[0] == "--cpu":
        words = words[1:]
        time.perf_counter = time.process_time
    from lockstep.config.load import load_run
    from lockstep.loops.start import start_run
    from lockstep.loops.timing import measure_timing, timing_lines
    from lockstep.track.writer import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        recipe = load_run([*words, f"runs_dir={folder}/runs"])
        start = time.perf_counter()
        timing = measure_timing(recipe)
        print(f"measured in {time.perf_counter() - start:.0f} s (0 if it was stored)")
        print("\n".join(timing_lines(timing, recipe)))
        run = start_run(recipe)
        steps = [
            row.metrics["time/step"] - row.metrics.get("time/evaluate", 0.0) for row in read_metrics(run) if row.step
        ]
        print(f"step: {timing.step:.2f} s planned, {median(steps):.2f} s in the middle of {len(steps)}")
        whole = ("time/step", "time/save")
        found = sum(row.metrics.get(name, 0.0) for row in read_metrics(run) for name in whole if row.step)
        first = ("time/evaluate", "time/validate")
        found += sum(row.metrics.get(name, 0.0) for row in read_metrics(run) for name in first if not row.step)
        planned = timing.run(recipe, timing.step)
        print(f"run: {planned:.1f} s planned, {found:.1f} s measured in steps, evaluations and checkpoints")
    off = planned / found - 1
    print(f"the plan is {off:+.0%} off, the limit is {LIMIT:.0%}")
    return int(abs(off) > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
