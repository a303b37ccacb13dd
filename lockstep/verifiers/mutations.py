r"""Builds replies with a known verdict to test a verifier: the right answer, and twenty wrong ones made from it.

Each wrong answer differs from the reference by construction, and is of a form that faulty graders have accepted: a
digit more or less, the sign, the reciprocal, two answers at once, a list around it, the reference as a part of something longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from lockstep.config.verifier import ANSWER
from lockstep.types import Prompt
from lockstep.verifiers.base import Verifier
from lockstep.verifiers.choice import Choice
from lockstep.verifiers.code import Code
from lockstep.verifiers.composite import Composite
from lockstep.verifiers.exact import Numeric, Text
from lockstep.verifiers.expression import Expression, spelling
from lockstep.verifiers.judge import Judge
from lockstep.verifiers.normalise import close, normalise_text, parse_number
from lockstep.verifiers.python import UserGrader
from lockstep.verifiers.regex import Regex
from lockstep.verifiers.sets import UnorderedSet, split_items
from lockstep.verifiers.structured import StructuredJson, read_json, same

COUNT = 20
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def right_reply(verifier: Verifier, prompt: Prompt) -> str | None:
    """Return a reply that must score 1; None if none can be made from the reference."""
    match verifier:
        case Regex(pattern=None):
            example = prompt.data.get("example")
            return f"\\boxed{{{example}}}" if isinstance(example, str) else None
        case Regex():
            return verifier.shown_as.replace(ANSWER, prompt.answer)
        case StructuredJson():
            return f"```json\n{prompt.answer}\n```" if verifier.equal else None
        case Code():
            return f"```python\n{prompt.answer}\n```" if prompt.answer.strip() else None
        case Judge():
            return None if verifier.rule is None else right_reply(verifier.rule, prompt)
        case UserGrader() if not prompt.answer:
            return None
        case Composite():
            return right_reply(verifier.parts[0].verifier, prompt)
        case _:
            return f"The answer is \\boxed{{{prompt.answer}}}."


def wrong_replies(verifier: Verifier, prompt: Prompt) -> tuple[str, ...]:
    """Up to 20 wrong replies, which must score 0; none for a function of the user's."""
    match verifier:
        case UserGrader():
            return ()
        case Judge():
            return () if verifier.rule is None else wrong_replies(verifier.rule, prompt)
        case Composite():
            return wrong_replies(verifier.parts[0].verifier, prompt)
        case Regex(pattern=None):
            return ()
        case Regex():
            answers = _numbers(prompt.answer, 1e-6) if verifier.compare == "number" else _texts(prompt.answer)
            replies = [verifier.shown_as.replace(ANSWER, answer) for answer in answers]
            return tuple(reply for reply in replies if _finds(verifier, reply, prompt.answer))[:COUNT]
        case Code():
            return tuple(f"```python\n{program}\n```" for program in cheats(prompt.answer))
        case StructuredJson():
            return tuple(f"```json\n{text}\n```" for text in _json(prompt.answer))[:COUNT] if verifier.equal else ()
        case _:
            return tuple(f"The answer is \\boxed{{{answer}}}." for answer in _answers(verifier, prompt.answer))[:COUNT]


def cheats(solution: str) -> tuple[str, ...]:
    """Twenty programs that do not do what the solution does; most would pass where tests and program share a process."""
    equal = "class E:\n    def __eq__(self, o): return True\n    def __call__(self, *a, **k): return self\n"
    starts = ("def ", "class ")
    names = [line.split()[1].partition("(")[0].strip(":") for line in solution.splitlines() if line.startswith(starts)]
    early = ("import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit", "raise KeyboardInterrupt")
    patched = (
        "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {'__init__': lambda s, *a: exit(0)})",
        "import atexit, os\natexit.register(lambda: os._exit(0))\nraise ValueError",
        "import sys\nsys.settrace(lambda *a: None)\nsys.modules['builtins'].all = lambda x: True",
        "print('OK')\nprint('passed')",
        "import os\nos.write(1, b'{\"passed\": 1}')",
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"passed": 1, "first": ""}\\n\')\n    except OSError: pass',
        "import signal\nsignal.alarm(1)",
    )
    defined = [equal + "".join(f"{name} = E()\n" for name in names)]
    for body in (
        "raise AssertionError",
        "raise SystemExit(0)",
        "yield",
        "import os\n    os._exit(0)",
        "return object()",
    ):
        defined.append("".join(f"def {name}(*a, **k):\n    {body}\n" for name in names))
    broken = ("", "pass", "def", "(" * 300)
    return tuple(dict.fromkeys((*broken, *early, *patched, *defined)))[:COUNT]


def _answers(verifier: Verifier, reference: str) -> Sequence[str]:
    match verifier:
        case Numeric():
            return _numbers(reference, verifier.tolerance)
        case Text():
            return _texts(reference)
        case Choice():
            return _choices(verifier, reference)
        case UnorderedSet():
            return _sets(verifier, reference)
        case Expression():
            return _expressions(reference)
        case _:
            return ()


def _numbers(reference: str, tolerance: float) -> list[str]:
    """Other numbers, exactly written, and things that are no number."""
    value = parse_number(reference)
    if value is None:
        return []
    step = Fraction(repr(tolerance)) * max(Fraction(1), abs(value)) * 2
    others: list[Fraction] = [
        value + 1,
        value - 1,
        -value,
        value * 10,
        value / 10,
        value + 10,
        value - 10,
        2 * value,
        value + 2,
    ]
    near = step if value.denominator > 1 else Fraction(1, 2)
    others += [value + near, value - near]
    others += [
        value * 100,
        value / 100,
        value + 100,
        value - 100,
        value + 1000,
        value**2 if abs(value) < 10**6 else value + 3,
    ]
    others += [value + n for n in range(3, 12)]
    different = [other for other in others if not close(other, value, tolerance)]
    text = reference.strip()
    odd = [
        "",
        f"{text}, {_written(value + 1)}",
        f"{text} or {_written(value + 1)}",
        f"{text} {text}",
        f"not {text}",
        "nan",
        "\\infty",
    ]
    return _distinct([*odd, *map(_written, different)], lambda _: False)


def _written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _texts(reference: str) -> list[str]:
    text = reference.strip()
    found = [
        "",
        text[1:],
        text[:-1],
        text + text,
        f"{text} x",
        f"x {text}",
        f"not {text}",
        f"{text} or not",
        text[::-1],
        "?",
    ]
    found += [text[:i] + ("x" if text[i] not in "xX" else "y") + text[i + 1 :] for i in range(len(text))][:20]
    found += [f"{text}{n}" for n in range(20)]
    balanced = [other for other in found if other.count("{") == other.count("}")]
    return _distinct(balanced, lambda other: normalise_text(other) == normalise_text(text))


def _choices(verifier: Choice, reference: str) -> list[str]:
    right = verifier.read(reference)
    options = _LETTERS[: verifier.options]
    found = ["", *(letter for letter in options), *(f"({letter})" for letter in options)]
    found += [", ".join(options), "all of the above", "none", "?", "1", _LETTERS[verifier.options % 26] * 2, "AB" * 3]
    found += [f"{a} or {b}" for a in options for b in options if a != b] + [f"option {n}" for n in range(COUNT)]
    return _distinct(found, lambda other: verifier.read(other) == right)


def _sets(verifier: UnorderedSet, reference: str) -> list[str]:
    items = split_items(reference)
    read = verifier.read(reference)
    found = ["", ", ".join(items[1:]), ", ".join(items[:-1]), "; ".join([*items, "0"]), "; ".join([*items, "1"]), "?"]
    for i, item in enumerate(items):
        value = parse_number(item)
        for other in (
            [f"{item}x", f"x{item}"] if value is None else [_written(value + 1), _written(-value), _written(10 * value)]
        ):
            found.append("; ".join([*items[:i], other, *items[i + 1 :]]))
    found += ["; ".join([*items, str(n)]) for n in range(2, 25)]
    return _distinct(
        found,
        lambda other: (made := verifier.read(other)) is not None and read is not None and verifier.same(made, read),
    )


def _expressions(reference: str) -> list[str]:
    """Return other numbers for a number; for anything else, expressions with something added or a part changed."""
    text = reference.strip()
    if parse_number(text) is not None:
        return _numbers(text, 1e-6)
    found = ["", "?", "0", "\\text{unknown}", f"{text}, {text} + 1"]
    plain = not any(
        sign in text for sign in ("=", "<", ">", "\\le", "\\ge", "\\in", ",", "\\cup", "[", "\\infty", "\\text", "\\{")
    )
    if plain:
        found += [f"{text} + {n}" for n in range(1, 16)] + [f"\\frac{{{text}}}{{2}} + \\sqrt{{{n}}}" for n in (2, 3, 5)]
    for i, char in enumerate(text):
        if char.isascii() and char.isdigit():
            found.append(text[:i] + str((int(char) + 1) % 10) + text[i + 1 :])
    found += [f"{n}x^7 - \\frac{{{n + 1}}}{{97}}" for n in range(2, 2 + COUNT)]  # of nothing that a reference would be
    return _distinct(found, lambda other: spelling(other) == spelling(text))


def _json(reference: str) -> list[str]:
    try:
        value = read_json(reference)
    except ValueError:
        return []
    others = [other for other in _changed(value) if not same(other, value)]
    found = ["", "{", "null" if value is not None else "0", reference[:-1], *map(json.dumps, others)]
    found += [json.dumps([value] * n) for n in range(1, 20)]
    return _distinct(found, lambda other: other.strip() == reference.strip())


def _changed(value: Any) -> Iterator[Any]:
    """JSON values that differ from `value` in one place."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (value + 1, -value, str(value))
        case str():
            yield from (value + "x", value[1:], [value])
        case list():
            yield from ([*value, None], value[1:])
            for i, item in enumerate(value):
                yield from ([*value[:i], other, *value[i + 1 :]] for other in _changed(item))
        case dict():
            yield {**value, "\u0000": 1}
            for key, item in value.items():
                yield {name: kept for name, kept in value.items() if name != key}
                yield from ({**value, key: other} for other in _changed(item))
        case _:
            yield 0


def _finds(verifier: Regex, reply: str, reference: str) -> bool:
    """Return whether the pattern reads something else than the reference: it may cut a wrong answer down to the right one."""
    found = verifier.find(reply).text or ""
    if verifier.compare == "text":
        return normalise_text(found) != normalise_text(reference)
    value, right = parse_number(found), parse_number(reference)
    return value is None or right is None or not close(value, right, 1e-6)


def _distinct(answers: Sequence[str], right: Callable[[str], bool]) -> list[str]:
    """Return the answers that are not right, each once."""
    return [answer for answer in dict.fromkeys(answers) if not right(answer)]
