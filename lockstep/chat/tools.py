"""Tools in a prompt: shown by the template where it can, else explained in the system text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lockstep.types import Message

_TOOLS = re.compile(r"\btools\b")
_EXPLAINED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The Hermes convention, in the words of Qwen's chat template."""


def shows_tools(template: str) -> bool:
    """Return whether a chat template has a place for tools."""
    return _TOOLS.search(template) is not None


def with_tools(turns: Sequence[Message], tools: str) -> list[Message]:
    """Return the turns with the tools, a JSON list of function schemas, explained at the end of their system text."""
    text = _EXPLAINED.format(tools="\n".join(json.dumps(tool) for tool in json.loads(tools)))
    if turns and turns[0]["role"] == "system":
        return [Message(role="system", content=f"{turns[0]['content']}\n\n{text}"), *turns[1:]]
    return [Message(role="system", content=text), *turns]
