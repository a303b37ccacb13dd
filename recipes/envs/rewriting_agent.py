"""An agent for recipes/envs/agent.yaml: it thinks in several turns and replaces its history by a summary of its own.

It is an ordinary program: it knows the address of an OpenAI endpoint and nothing of the training.
"""

import json
import sys

import httpx

TURNS, SUM_UP_AFTER = 8, 4

task = json.load(sys.stdin)
client = httpx.Client(
    base_url=task["base_url"], headers={"Authorization": f"Bearer {task['api_key']}"}, timeout=600, trust_env=False
)


def reply(messages: list[dict[str, str]]) -> str:
    body = {"model": task["model"], "messages": messages, "max_tokens": 48}
    answer = client.post("/chat/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


history, said = list(task["messages"]), ""
for turn in range(TURNS):
    said = reply(history)
    history += [{"role": "assistant", "content": said}, {"role": "user", "content": "Check it, then say it again."}]
    if turn % SUM_UP_AFTER == SUM_UP_AFTER - 1 and turn + 1 < TURNS:
        summary = reply([*history, {"role": "user", "content": "Sum up what we know, in one sentence."}])
        history = [*task["messages"], {"role": "assistant", "content": summary}]
        history.append({"role": "user", "content": "State the final answer."})
print(said)
