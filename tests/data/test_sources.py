from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.config.data import Data
from lockstep.data.load import open_rows
from lockstep.data.sources import read_rows
from lockstep.errors import DataError
from lockstep.types import Prompt

FILES = Path(__file__).parent / "files"


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def read_prompts(path: Path, name: str, task: str = "", **columns: str) -> tuple[Prompt, ...]:
    return open_rows(Data(source=str(path), **columns), where="data").prompts(name, task)


def problems(path: Path, **columns: str) -> str:
    with pytest.raises(DataError) as error:
        read_prompts(path, "t", **columns)
    return str(error.value)


def test_sample_file_in_both_formats(tmp_path):
    columns = {"prompt": "question", "answer": "answer", "id": "key"}
    prompts = read_prompts(FILES / "sums.jsonl", "sums", **columns)
    assert prompts[0] == Prompt("sums/a1", user("What is 2 + 2?"), "4", "sums", {"level": 1})
    assert prompts[1].answer == "7"  # a number in the file
    assert [m["role"] for m in prompts[2].messages] == ["system", "user", "assistant", "user"]
    assert len(prompts) == 4
    rows = [json.loads(line) for line in (FILES / "sums.jsonl").read_text().splitlines()]
    simple = [row | {"answer": str(row["answer"])} for row in rows if isinstance(row["question"], str)]
    pq.write_table(pa.Table.from_pylist(simple), tmp_path / "sums.parquet")
    assert read_prompts(tmp_path / "sums.parquet", "sums", **columns) == (prompts[0], prompts[1], prompts[3])


def test_parquet_messages_and_row_groups(tmp_path):
    turns = [{"role": "user", "content": "1 + 1"}]
    table = pa.table({"prompt": [turns] * 3000, "answer": range(3000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    prompts = read_prompts(tmp_path / "a.parquet", "a")
    assert [p.id for p in prompts[:2]] == ["a/1", "a/2"]
    assert prompts[2999] == Prompt("a/3000", user("1 + 1"), "2999", "a", {})


def test_ids_and_task(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"prompt": "p", "answer": 1}', "", '{"prompt": "q", "answer": 2.5}')
    prompts = read_prompts(file, "a@id_probe", task="a")
    assert [(p.id, p.task, p.answer) for p in prompts] == [("a@id_probe/1", "a", "1"), ("a@id_probe/3", "a", "2.5")]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "p", "answer": 1}\r', b"\r")
    assert read_prompts(file, "a")[0].messages == user("p")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "malformed JSON: Expecting property name"),
        ('{"prompt": "p", "answer": 1, "answer": 2}', "malformed JSON: the key 'answer' occurs twice, with 1 and 2"),
        ('{"prompt": [{"role": "user", "role": "system"}]}', "malformed JSON: the key 'role' occurs twice, with 'user' and"),
        ('{"prompt": "p", "answer": NaN}', "malformed JSON: NaN is not a JSON number"),
        ('{"prompt": "p", "answer": 1e999}', "'answer' is inf, not a finite number"),
        ('{"prompt": "p", "answer": ' + "9" * 5000 + "}", "malformed JSON: Exceeds the limit"),
        ("[" * 100_000, "malformed JSON: "),
        ("[1]", "a JSON object is expected, this is a list"),
        (b'{"prompt": "\xff", "answer": 1}', "not UTF-8 at byte 12"),
        ('{"answer": 1}', "there is no column 'prompt'; it has 'answer'"),
        ('{"prompts": "p", "answer": 1}', "there is no column 'prompt'; did you mean 'prompts'?"),
        ('{"prompt": "p"}', "there is no column 'answer'"),
        ('{"prompt": null, "answer": 1}', "'prompt' is null"),
        ('{"prompt": 3, "answer": 1}', "'prompt' must be text or a list of messages, this is a number"),
        ('{"prompt": " \\n", "answer": 1}', "'prompt' is empty"),
        ('{"prompt": "p", "answer": ""}', "'answer' is empty"),
        ('{"prompt": "p", "answer": true}', "'answer' must be text or a number, this is true or false"),
        ('{"prompt": "p", "answer": ["1"]}', "'answer' must be text or a number, this is a list"),
        ('{"prompt": "\\ud800", "answer": 1}', "'prompt' has a lone surrogate at character 0"),
        ('{"prompt": [], "answer": 1}', "'prompt' must end with a user message"),
        ('{"prompt": ["p"], "answer": 1}', "prompt[0] must have role and content, and of"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "prompt[0] must have role and content"),
        ('{"prompt": [{"role": "bot", "content": "p"}], "answer": 1}', "prompt[0].role must be one of system, user, assistant"),
        ('{"prompt": [{"role": ["user"], "content": "p"}], "answer": 1}', "prompt[0].role must be one of"),
        ('{"prompt": [{"role": "user", "content": 3}], "answer": 1}', "prompt[0].content must be text, this is a number"),
        ('{"prompt": [{"role": "user", "content": ""}], "answer": 1}', "'prompt[0].content' is empty"),
        ('{"prompt": [{"role": "assistant", "content": "p"}], "answer": 1}', "'prompt' must end with a user message"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, line, problem):
    file = write(tmp_path / "a.jsonl", '{"prompt": "p", "answer": 1}', line)
    message = problems(file)
    assert "1 of 2 rows are bad" in message
    assert f"a.jsonl:2: {problem}" in message


def test_ids_are_checked(tmp_path):
    row = '{{"prompt": "p", "answer": 1, "id": {}}}'
    file = write(tmp_path / "a.jsonl", *(row.format(i) for i in ("1", '"1"', "1.5", "null", '""', "true")))
    message = problems(file, id="id")
    assert "5 of 6 rows" in message
    assert "a.jsonl:2: its id '1' is already the id of row 1" in message
    assert "a.jsonl:3: 'id' must be text or a whole number, this is a number" in message
    assert "a.jsonl:4: 'id' is null" in message


def test_bad_rows_of_one_reason_are_one_line_and_of_many_reasons_the_first_ten(tmp_path):
    file = write(tmp_path / "a.jsonl", *(["{"] * 25), '{"prompt": "p", "answer": 1}')
    message = problems(file)
    assert "25 of 26 rows are bad" in message
    assert "a.jsonl:1:" in message
    assert "(and 24 more rows)" in message
    assert "a.jsonl:2:" not in message
    many = write(tmp_path / "b.jsonl", *(f'{{"c{i}": 1}}' for i in range(25)), '{"prompt": "p", "answer": 1}')
    message = problems(many)
    assert "25 of 26 rows are bad; the first reasons" in message
    assert "b.jsonl:10:" in message
    assert "b.jsonl:11:" not in message


def test_parquet_rows_are_checked(tmp_path):
    table = pa.table({"prompt": ["p", None, " "], "answer": [1.0, 2.0, float("nan")]})
    pq.write_table(table, tmp_path / "a.parquet")
    message = problems(tmp_path / "a.parquet")
    assert "2 of 3 rows" in message
    assert "a.parquet:2: 'prompt' is null" in message
    assert "a.parquet:3: 'prompt' is empty" in message


def test_a_reply_to_learn_is_not_nan(tmp_path):
    pq.write_table(pa.table({"prompt": ["p", "q"], "answer": [1.0, float("nan")]}), tmp_path / "a.parquet")
    rows = open_rows(Data(source=str(tmp_path / "a.parquet")), where="sft.data")
    with pytest.raises(DataError, match="'answer' is nan, not a finite number"):
        list(rows.conversations())


def test_damaged_parquet_is_named(tmp_path):
    pq.write_table(pa.table({"prompt": ["p"] * 5000, "answer": [str(i) for i in range(5000)]}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"PAR1" + b"\0" * 100):
        (tmp_path / "a.parquet").write_bytes(damaged)
        assert "a.parquet: the parquet file cannot be read" in problems(tmp_path / "a.parquet")


def test_missing_foreign_and_empty_files(tmp_path):
    write(tmp_path / "train.jsonl", "")
    assert f"trian.jsonl; nearest: {tmp_path / 'train.jsonl'}" in problems(tmp_path / "trian.jsonl")
    assert "the source has no rows" in problems(tmp_path / "train.jsonl")
    write(tmp_path / "train.txt", "prompt,answer")
    fix = "give a file that ends in .parquet, .jsonl, .json or .csv"
    assert f"files of type .txt cannot be read\n  to fix: {fix}" in problems(tmp_path / "train.txt")


def test_rows_are_read_one_at_a_time(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"a": 1}', "{")
    rows = read_rows(file)
    assert next(rows).values == {"a": 1}
    assert next(rows).values is None


@given(st.binary(max_size=200))
def test_any_bytes_give_prompts_or_a_data_error(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("any") / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError):  # no 200 random bytes are a row with prompt and answer
        read_prompts(file, "a")


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
@given(content=st.binary(max_size=300) | st.text(alphabet='a,"\n\r[]{}: 1', max_size=60).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_of_any_format_give_rows_or_a_data_error(tmp_path_factory, suffix, content):
    file = tmp_path_factory.mktemp("any") / f"a{suffix}"
    file.write_bytes(content)
    try:
        rows = list(read_rows(file))
    except DataError:
        return
    assert all((row.values is None) == bool(row.problem) for row in rows)
    assert len({row.number for row in rows}) == len(rows)


@given(
    st.text(min_size=1, max_size=300)
    | st.sampled_from(["\0", "~nobody/x", "a" * 5000, "//", ".", "a/b/", "hf://datasets/a/b@/x"])
)
def test_any_text_is_a_source_or_refused_with_a_reason(text):
    try:
        open_rows(Data(source=text), where="data")
        said = "Value error"
    except (ValidationError, DataError) as error:
        said = str(error)
    assert "Value error" in said or "to fix: " in said


UNFOLD = """
import resource, sys
from pathlib import Path
from lockstep.data.sources import read_rows
from lockstep.errors import DataError
import psutil, pyarrow.parquet
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (3 << 30), -1))
print(sum(len(row.values["prompt"]) for row in read_rows(Path(sys.argv[1]))))
"""


def test_a_parquet_file_of_a_kilobyte_does_not_unfold_into_gigabytes(tmp_path):
    """One value of 9 MB stands in its dictionary, and a thousand rows name it."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 9_000_000]))
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"prompt": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    done = subprocess.run([sys.executable, "-c", UNFOLD, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == "9000000000\n", done.stderr


def test_a_list_of_objects_with_a_key_twice_is_refused(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('[{"prompt": "p", "answer": "4"}, {"prompt": "p", "answer": "5", "answer": "6"}]')
    with pytest.raises(DataError, match=r"the key 'answer' occurs twice, with '5' and '6'"):
        list(read_rows(file))


def test_decimals_of_parquet_are_numbers(tmp_path):
    table = pa.table({"prompt": ["p"], "answer": pa.array([Decimal("2.50")], pa.decimal128(6, 2))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert [prompt.answer for prompt in read_prompts(tmp_path / "a.parquet", "a")] == ["2.50"]
