"""Time of the page of `lockstep view` over 100,000 rollouts: python benchmarks/view.py [--rollouts N]

Writes a run of 400 steps with the package's own writer, then asks what a browser asks, over the server.
The exit status is 1 if the first page takes over a second of CPU time (of all threads, this client's too), or a filter, asked
for the first time, over half a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from lockstep.track.rollouts import write_rollouts
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import RunWriter
from lockstep.types import FinishReason, Grade, Group, Message, Prompt, Rollout
from lockstep.view.api import Viewer
from lockstep.view.server import Server

STEPS = 400
SAMPLES = 8
WORDS = re.findall(
    r"\w+", "so the sum of these numbers is therefore we add them and carry one then box the answer as asked"
)
FIRST_S, FILTER_S = 1.0, 0.5
QUESTIONS = (
    "rollouts?result=wrong", "rollouts?text=carry+one+then", "rollouts?text=nothing+has+this", "rollouts?order=longest",
    "rollouts?first=100&last=200&reward_min=1&length_max=60", "rollouts?finish=length&answer=none", "rollouts?offset=50000",
    "rollout?step=200&row=17", "group?step=200&prompt=200-2", "funnel", "curves", "state",
)  # fmt: skip


def group(dice: random.Random, name: str) -> Group:
    prompt = Prompt(name, (Message(role="user", content=" ".join(dice.choices(WORDS, k=40))),), "7", "sums")
    rows = []
    for sample in range(SAMPLES):
        count, right = dice.randint(20, 200), dice.random() < 0.4
        grade = Grade(float(right), {"correct": float(right)}, "7" if right else None, "boxed")
        ids = tuple(dice.choices(range(5, 600), k=count))
        logprobs = tuple(-dice.random() for _ in ids)
        text = " ".join(dice.choices(WORDS, k=count))
        finish = FinishReason.LENGTH if count > 190 else FinishReason.STOP
        rows.append(Rollout(prompt, (1, 3, 4), ids, logprobs, (True,) * count, text, finish, 3, grade, sample))
    return Group(prompt, tuple(rows))


def write(path: Path, rollouts: int) -> None:
    dice = random.Random(0)
    groups = rollouts // STEPS // SAMPLES
    recipe = f"name: large\nsteps: {STEPS}\n"
    with RunDirectory.create(path, recipe, {}) as run, RunWriter(run) as writer:
        for step in range(1, STEPS + 1):
            made = [group(dice, f"{step}-{i}") for i in range(groups)]
            write_rollouts(run, step, made, [[dice.choice((-1.0, 0.0, 1.0)) for _ in one.rollouts] for one in made])
            writer.step(step, {f"metric/{i}": dice.random() for i in range(60)} | {"reward/mean": dice.random()})


def ask(address: str, question: str) -> tuple[float, dict]:
    start = time.perf_counter()
    with urllib.request.urlopen(f"{address}api/{question}") as response:
        answer = json.load(response)
    return time.perf_counter() - start, answer


def cost(viewer: Viewer) -> tuple[float, float]:
    """Return the CPU seconds of one look for news that finds none, and of one that finds a new row of metrics."""
    start = time.process_time()
    for _ in range(50):
        viewer.index.refresh()
        viewer.state({})
    idle = (time.process_time() - start) / 50
    start = time.process_time()
    for _ in range(5):
        os.utime(viewer.runs[0].run.metrics_path)
        viewer.state({})
        viewer.curves({})
    return idle, (time.process_time() - start) / 5


def follow(server: Server, path: Path, seconds: float, every: float) -> float:
    """Return the CPU seconds of the server a second, while a run stores a step every `every` seconds and a page follows it."""
    folder, lines = path / "rollouts", (path / "metrics.jsonl").read_text().splitlines()
    spent = {"writer": 0.0}
    done = threading.Event()

    def train() -> None:
        for step in range(STEPS + 1, STEPS + 1 + int(seconds / every)):
            shutil.copy(folder / f"step_{step - STEPS:06d}.parquet", path / "new.parquet")
            (path / "new.parquet").rename(folder / f"step_{step:06d}.parquet")
            row = json.loads(lines[-1]) | {"step": step}
            with (path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            spent["writer"] = time.thread_time()
            time.sleep(every)
        done.set()

    start, own, before = time.process_time(), time.thread_time(), ""
    threading.Thread(target=train, daemon=True).start()
    while not done.is_set():
        state = ask(server.address, "state")[1]
        if (now := json.dumps(state["runs"])) != before:
            ask(server.address, "curves")
        before = now
        done.wait(state["pause"])
    return (time.process_time() - start - (time.thread_time() - own) - spent["writer"]) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large"
        write(path, args.rollouts)
        megabytes = sum(file.stat().st_size for file in path.rglob("*.parquet")) / 2**20
        print(f"{args.rollouts} rollouts in {STEPS} files, {megabytes:.0f} MiB")
        begun, began_cpu = time.perf_counter(), time.process_time()
        viewer = Viewer([path])
        with Server(viewer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            viewer.follow()
            while not ask(server.address, "rollouts")[1]["rows"]:
                time.sleep(0.01)
            first = time.process_time() - began_cpu
            print(
                f"first page  {time.perf_counter() - begun:6.3f} s, CPU {first:.3f} s (while the other files are read)"
            )
            while ask(server.address, "state")[1]["runs"][0]["read"] < STEPS:
                time.sleep(0.05)
            print(f"all read    {time.perf_counter() - begun:6.3f} s, CPU {time.process_time() - began_cpu:.3f} s")
            slowest = 0.0
            for question in QUESTIONS:
                before = time.process_time()
                cold = ask(server.address, question)[0]
                cpu = time.process_time() - before
                warm = ask(server.address, question)[0]
                slowest = max(slowest, cpu if question.startswith("rollouts") else 0.0)
                print(f"{cold:6.3f} s, CPU {cpu:.3f} s, again {warm:6.3f} s  {question}")
            for every, seconds in ((1.0, 40.0), (5.0, 120.0)):
                share = follow(server, path, seconds, every)
                print(
                    f"CPU while a run stores a step every {every:g} s and a page shows its curves: {share:.2%} of one core"
                )
            server.shutdown()
            idle, new = cost(viewer)
            print(f"CPU of one look: {1e3 * idle:.1f} ms without news, {1e3 * new:.0f} ms with a new step")
        viewer.close()
    return int(first > FIRST_S or slowest > FILTER_S)


if __name__ == "__main__":
    raise SystemExit(main())
