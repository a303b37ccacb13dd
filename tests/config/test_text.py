from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.text import Value, dotted, parse, plain, quoted, read, to_yaml
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-6", 3e-6),
        ("1e3", 1000.0),
        ("+12", 12),
        ("010", 10),  # octal in YAML 1.1
        ("0o17", 15),
        ("0xff", 255),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),  # a base-60 number in YAML 1.1
        ("2020-01-01", "2020-01-01"),  # a date in YAML 1.1
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", float("-inf")),
        ("no", "no"),  # false in YAML 1.1
        ("True", True),
        ("~", None),
        ("'3'", "3"),
        ('"null"', "null"),
        ("<<", "<<"),
        ("[a, 1, {b: true}]", ["a", 1, {"b": True}]),
    ],
)
def test_yaml_1_2_core_types(text: str, value: Value) -> None:
    parsed = parse(text, "").value
    assert parsed == value
    assert type(parsed) is type(value)


def test_lines_are_those_of_keys_and_items() -> None:
    document = parse("# a recipe\na:\n  b: 1\n  c:\n    - x\n    - y: 2\n", "f.yaml")
    assert document.lines[("a",)] == 2
    assert document.lines[("a", "b")] == 3
    assert document.lines[("a", "c", 0)] == 5
    assert document.lines[("a", "c", 1, "y")] == 6


def test_keys_written_twice_are_all_reported_and_the_first_counts() -> None:
    document = parse("a: 1\nb: {c: 1, c: 2}\na: 3\n", "f.yaml")
    assert document.mistakes == [
        "f.yaml:2: b.c: written twice, first in line 2",
        "f.yaml:3: a: written twice, first in line 1",
    ]
    assert document.value == {"a": 1, "b": {"c": 1}}


def test_keys_that_are_no_text_are_reported() -> None:
    mistakes = parse("1: a\n? [x]\n: b\n", "f.yaml").mistakes
    assert mistakes == [
        'f.yaml:1: recipe: key "1" is not text; put it in quotes',
        "f.yaml:2: recipe: key (a list or mapping) is not text; put it in quotes",
    ]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a: [1, 2\nb: 3", 2, "while parsing a flow sequence"),
        ("a: b: c", 1, "mapping values are not allowed here"),
        ("a:\n\t- b", 2, "cannot start any token"),
        ("a: &x 1\nb: *x", 2, "aliases (*name) are not allowed"),
        ("x: 1\na: !!python/object/apply:os.system [ls]", 2, "tags (!name) are not allowed"),
        ("a: !!int '3'", 1, "tags (!name) are not allowed"),
        ("a: 1\n---\nb: 2", 2, "expected a single document"),
        ("a: " + "[" * 5000, 1, "nested deeper than 32 levels"),
        ("a: 1\nb: \x07", 2, "character 0x7 is not allowed"),
        ('a: "\\UFFFFFFFF"', 1, ""),
        ("%YAML 1." + "1" * 5000, 1, ""),
    ],
)
def test_what_is_no_recipe_is_one_line_with_file_and_line(text: str, line: int, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"f.yaml:{line}: ")
    assert reason in mistake
    assert "\n" not in mistake


def test_a_bomb_of_aliases_is_refused_before_it_unfolds() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
    with pytest.raises(ConfigError, match=r"f:2: aliases"):
        parse(bomb, "f")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9t\xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: not UTF-8 \(byte 8\)"):
        read(latin)
    wide = tmp_path / "wide.yaml"
    wide.write_text("steps: 3\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"wide.yaml:1: not UTF-8"):
        read(wide)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="larger than 1 MB"):
        read(big)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "none.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_text("steps: 3\n", encoding="utf-8-sig")
    assert read(path).value == {"steps": 3}


def test_text_that_looks_like_something_else_is_quoted() -> None:
    value = {
        "a": "1e-6",
        "b": "no",
        "c": "3",
        "d": "",
        "e": "\x85",
        "f": "two\nlines\n",
        "g": "3e5",
        "h": None,
        "i": 1e-6,
    }
    text = to_yaml(value)
    assert parse(text, "").value == value
    assert "a: '1e-6'" in text
    assert "f: |\n  two\n  lines\n" in text


def test_plain_refuses_what_json_cannot_hold() -> None:
    nan = float("nan")
    copy, refused = plain({"a": [1, nan], "b": {2: 3}, "c": (1, 2), "d": "\ud800", "e": {4}, "f": 2**2000, "g": 1.5})
    assert copy == {"a": [1, None], "b": {}, "c": [1, 2], "d": None, "e": None, "f": None, "g": 1.5}
    assert set(refused) == {("a", 1), ("b", "2"), ("d",), ("e",), ("f",)}
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    assert "nested" in next(iter(plain(deep)[1].values()))


def test_values_in_messages_fit_one_line() -> None:
    assert quoted({"a": [None, True, 0.5]}) == "{a: [null, true, 0.5]}"
    assert quoted("a\nb\u2028\ud800") == '"a\\nb\\u2028\\ud800"'
    assert len(quoted("x" * 10_000_000)) == 60
    assert quoted(float("-inf")) == "-.inf"
    assert quoted(10**100_000) == "(a number of 332193 bits)"
    assert dotted(("eval", "modes", 0, "a b")) == 'eval.modes.0."a b"'
