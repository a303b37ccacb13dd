"""Rows as OpenAI's chat format has them: a column of tools, calls, and results."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from lockstep.chat.chat import ChatFormat
from lockstep.config.data import Data
from lockstep.config.schema import Chat
from lockstep.data.build import build
from lockstep.data.load import open_rows
from lockstep.data.sets import DataSet, load_set
from lockstep.errors import DataError
from tests.saying import Told

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 4, "b": 3})}}
CHAT = [
    {"role": "user", "content": "What is 4 + 3?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]


def rows(path: Path, *values: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_question_are_part_of_its_prompt(tmp_path: Path, tools: object) -> None:
    path = rows(tmp_path / "a.jsonl", {"prompt": [CHAT[0]], "answer": "7", "tools": tools, "level": 1})
    (prompt,) = open_rows(Data(source=str(path)), where="data").prompts()
    assert json.loads(prompt.tools) == [TOOL]
    assert prompt.data == {"level": 1}


def test_parquet_writes_nulls_into_functions_and_they_are_left_out(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "now", "strict": True}}
    table = pa.Table.from_pylist([{"prompt": "a?", "answer": "7", "tools": [TOOL, other]}])
    pq.write_table(table, tmp_path / "a.parquet")
    (prompt,) = open_rows(Data(source=str(tmp_path / "a.parquet")), where="data").prompts()
    assert json.loads(prompt.tools) == [TOOL, other]


def test_a_column_of_another_meaning_stays_data(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"prompt": "a?", "answer": "7", "tools": ["hammer"]})
    (prompt,) = open_rows(Data(source=str(path)), where="data").prompts()
    assert (prompt.tools, prompt.data) == ("", {"tools": ["hammer"]})


def test_calls_and_results_of_a_chat_are_turns(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"messages": CHAT, "tools": [TOOL]})
    (chat,) = open_rows(Data(source=str(path), messages="messages"), where="data").conversations()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 3}}\n</tool_call>'
    assert [(turn["role"], turn["content"]) for turn in chat.messages] == [
        ("user", "What is 4 + 3?"),
        ("assistant", call),
        ("tool", "7"),
        ("assistant", "It is 7."),
    ]
    assert json.loads(chat.tools) == [TOOL]


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "no function with a name"),
        ({"role": "assistant", "tool_calls": [CALL]}, "must have role and content"),
        ({"role": "user", "content": "a", "image": "b"}, "of OpenAI's other fields only"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
            "is not JSON",
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "so"}], "tool_calls": [CALL]},
            r"messages\[1\].content must be text, this is a list",
        ),
        ({"role": "assistant", "content": "so", "tool_calls": CALL}, "tool_calls must be a list, this is an object"),
    ],
)
def test_a_broken_call_is_a_bad_row(tmp_path: Path, turn: dict[str, object], told: str) -> None:
    path = rows(tmp_path / "a.jsonl", {"messages": [CHAT[0], turn, CHAT[3]]})
    with pytest.raises(DataError, match=told) as error:
        list(open_rows(Data(source=str(path), messages="messages"), where="data").conversations())
    assert error.value.fix.endswith("data.messages=COLUMN")


def test_tools_are_rendered_with_a_chat_that_is_learnt(tiny_model_dir: Path) -> None:
    chat = ChatFormat(AutoTokenizer.from_pretrained(tiny_model_dir), Chat())
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is 7."}]
    plain, _ = chat.trained_mask(turns)  # type: ignore[arg-type]
    ids, trained = chat.trained_mask(turns, tools=json.dumps([TOOL]))  # type: ignore[arg-type]
    assert "Add two numbers" in chat.tokenizer.decode(list(ids))
    assert chat.render(turns[:1], json.dumps([TOOL])) == ids[: trained.index(True)]  # type: ignore[arg-type]
    assert chat.decode([i for i, on in zip(ids, trained, strict=True) if on]) == "It is 7."
    assert len(plain) < len(ids)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_is_built_keeps_the_tools(tmp_path: Path, format: str) -> None:
    path = rows(
        tmp_path / "a.jsonl", {"prompt": "4 + 3?", "answer": "7", "tools": [TOOL]}, {"prompt": "7?", "answer": "7"}
    )
    one = DataSet("train", "train", "task.data", Data(source=str(path)), False)
    build([load_set(one)], tmp_path / "out", format)  # type: ignore[arg-type]
    again = open_rows(Data(source=str(tmp_path / "out" / f"train.{format}"), id="id"), where="data").prompts()
    assert [prompt.tools and json.loads(prompt.tools) for prompt in again] == [[TOOL], ""]


def test_a_chat_in_memory_and_its_mask_have_the_tools(tmp_path: Path, tiny_model_dir: Path, told: Told) -> None:
    path = rows(tmp_path / "a.jsonl", {"chat": CHAT, "tools": [TOOL]})
    one = DataSet("train", "train", "sft.data", Data(source=str(path), messages="chat"), True)
    assert json.loads(load_set(one).prompts[0].tools) == [TOOL]
    code, text = told("data", "show", path, "messages=chat", f"model={tiny_model_dir}", "--mask")
    assert code == 0
    (conversation,) = open_rows(one.data, where="data").conversations()
    chat = ChatFormat(AutoTokenizer.from_pretrained(tiny_model_dir), Chat())
    ids, trained = chat.trained_mask(conversation.messages, last_only=True, tools=conversation.tools)
    assert f" · {len(ids)} tokens, {sum(trained)} trained" in text
