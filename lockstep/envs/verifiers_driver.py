"""The program that plays a verifiers environment, started by verifiers_env.py with the Python of that environment.

It imports no module of Lockstep.

    python verifiers_driver.py '{"env": {…}, "paths": […], "size": 100}'

It first writes a line of JSON with the tasks. Then it reads lines {"start": key, "task": index, "base_url": …, "api_key": …} or
{"stop": key}, and writes a line for each episode that ends. It ends when its standard input closes.
"""

import asyncio
import functools
import importlib
import itertools
import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever an environment prints goes to the log
    settings = json.loads(sys.argv[1])
    sys.path[:0] = settings["paths"]

    def say(**answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        environment = loaders.load_environment(loaders.resolve_env_config(settings["env"]))
        tasks = list(itertools.islice(environment.taskset, settings["size"]))
    except Exception as error:
        say(refused=f"{type(error).__name__}: {error}")
        return
    say(tasks=[shown(task.data) for task in tasks])
    asyncio.run(serve(environment, tasks, say))


def shown(data: Any) -> dict[str, object]:
    """Return what the owner needs of a task: its name, and its messages for people."""
    system, prompt = data.system_prompt, data.prompt_text or data.description or data.name or f"task {data.idx}"
    messages = [{"role": "system", "content": system}] if system else []
    return {"id": str(data.id or data.idx), "messages": [*messages, {"role": "user", "content": prompt}]}


async def serve(environment: Any, tasks: list[Any], say: Any) -> None:
    loop = asyncio.get_running_loop()
    running: dict[str, asyncio.Task[None]] = {}
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with environment.serving():
        while line := await reader.readline():
            ask = json.loads(line)
            if "stop" in ask:
                if (task := running.pop(ask["stop"], None)) is not None:
                    task.cancel()
                continue
            key = ask["start"]
            running[key] = loop.create_task(play(environment, tasks[ask["task"]], ask, say))
            running[key].add_done_callback(functools.partial(forget, running, key))


def forget(running: dict[str, asyncio.Task[None]], key: str, done: asyncio.Task[None]) -> None:
    if running.get(key) is done:
        del running[key]


async def play(environment: Any, task: Any, ask: dict[str, Any], say: Any) -> None:
    vf = importlib.import_module("verifiers.v1")
    variable = f"LOCKSTEP_KEY_{abs(hash(ask['start']))}"
    os.environ[variable] = ask["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=ask["base_url"], api_key_var=variable)
        episode = await environment.run_episode(task, vf.ModelContext(model=ask["model"], client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or len(episode.traces) != 1:
            first = (
                f"{errors[0].type}: {errors[0].message}"
                if errors
                else f"it plays {len(episode.traces)} agents, not one"
            )
            say(ended=ask["start"], error=first)
            return
        (trace,) = episode.traces
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        numbers = {**rewards, **trace.metrics}
        metrics = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        say(ended=ask["start"], reward=float(trace.reward), metrics=metrics, answer=trace.last_reply)
    except Exception as error:
        say(ended=ask["start"], error=f"{type(error).__name__}: {error}")
    finally:
        os.environ.pop(variable, None)


if __name__ == "__main__":
    main()
