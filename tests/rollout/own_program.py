"""A program that behaves well or badly, as its question says; it knows only the standard library."""

import json
import os
import pathlib
import sys
import threading
import time
import urllib.error
import urllib.request

task = json.load(sys.stdin)
kind = task["messages"][-1]["content"].split()[0]
assert task == json.loads(pathlib.Path(os.environ["LOCKSTEP_TASK"]).read_text())
assert "SECRET" not in os.environ
assert os.environ["OPENAI_BASE_URL"] == task["base_url"]


def ask(text: str, limit: int | None = 6, **more: object) -> str:
    body = {"model": task["model"], "messages": [{"role": "user", "content": text}], "max_tokens": limit, **more}
    request = urllib.request.Request(
        f"{task['base_url']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {task['api_key']}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def streamed(text: str, limit: int) -> list[str]:
    """The pieces of a reply."""
    body = {
        "model": task["model"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": limit,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{task['base_url']}/chat/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Authorization": f"Bearer {task['api_key']}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
    pieces = [json.loads(line)["choices"][0]["delta"].get("content") for line in lines]
    return [piece for piece in pieces if piece]


if kind == "stream":
    pieces = streamed("one", 60)
    print(json.dumps({"reward": float(len(pieces)), "answer": "".join(pieces)}))
if kind == "crash":
    ask("one")
    raise SystemExit("the wheel came off")
if kind == "hang":
    ask("one")
    print("too late to matter", flush=True)
    time.sleep(1000)
if kind == "idle":
    print("\\boxed{7}")
if kind == "greedy":  # asks until it is refused
    asked = 0
    try:
        while True:
            ask(f"again {asked}")
            asked += 1
    except urllib.error.HTTPError as error:
        print(asked, error.code, "so \\boxed{7}")
if kind == "wordy":
    ask("long", 1000)
    try:
        ask("longer", 1000)
    except urllib.error.HTTPError as error:
        print(error.code, "so \\boxed{7}")
if kind == "parallel":  # in an order that nobody knows
    threads = [threading.Thread(target=ask, args=(f"branch {number % 3}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\\boxed{7}")
if kind == "unlimited":  # two requests at once, neither with a limit
    refused: list[str] = []

    def one(text: str) -> None:
        try:
            ask(text, None, ignore_eos=True)
        except urllib.error.HTTPError as error:
            refused.append(f"{error.code} {error.read().decode()}")

    threads = [threading.Thread(target=one, args=(text,)) for text in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(*refused, "\\boxed{7}")
if kind == "seeded":
    ask("one", temperature=0.1, seed=3)
    print("\\boxed{7}")
if kind == "reward":
    print("some chatter", ask("one") and "")
    print(json.dumps({"reward": 0.5, "metrics": {"steps": 3}, "answer": "done"}))
if kind == "nonsense":
    ask("one")
    print("reward: a lot")
