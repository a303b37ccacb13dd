"""A black-box agent: it plays ten turns, and every four it replaces its history by a summary of its own. It knows only HTTP."""

import json
import sys

import httpx

task = json.load(sys.stdin)
client = httpx.Client(
    base_url=task["base_url"], headers={"Authorization": f"Bearer {task['api_key']}"}, timeout=120, trust_env=False
)


def reply(messages: list[dict[str, str]]) -> str:
    body = {"model": task["model"], "messages": messages, "max_tokens": 12}
    answer = client.post("/chat/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


history = list(task["messages"])
for turn in range(10):
    said = reply(history)
    history += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Go on, turn {turn}."}]
    if turn % 4 == 3:
        summary = reply([*history, {"role": "user", "content": "Sum up what was said."}])
        history = [*task["messages"], {"role": "assistant", "content": summary}, {"role": "user", "content": "Go on."}]
print("the answer is", len(history), "\\boxed{7}")
