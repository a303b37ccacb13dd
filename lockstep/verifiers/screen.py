r"""Rejects expressions that are too large for computer algebra, in time linear in the text.

The limits lie far above the answers of contest and textbook problems. The worker's own limits would stop a larger expression
too, but at the cost of that time and of the process.
"""

from __future__ import annotations

import math
import re
import string

from lockstep.verifiers.extract import DIGITS, MAX_DEPTH

MAX_LENGTH = 500
MAX_NESTING = 8
MAX_SUBSCRIPTS = 2
"""Subscripts within one another. Each further one takes a reader that has not met it a third of a second."""
MAX_LITERAL = 60
"""Digits of one number."""
MAX_ARGUMENT = 400
"""Largest number before a factorial sign or in a binomial coefficient."""
MAX_EXPONENT = 10_000
"""Largest written exponent."""
MAX_POWERS = 24
MAX_LISTED = 40
"""Commas, ampersands and row ends."""
MAX_ROOTS = 8
MAX_NUMBERS = 48
MAX_WORD = 24
MAX_LETTERS = 80
MAX_DEGREE = 150
"""Largest product of the written powers of sums: what multiplying out would make of them."""
SMALL = 20
"""Largest number in something whose factorial is taken."""
MAX_COMMANDS = 60

CALCULUS = ("\\sum", "\\prod", "\\int", "\\oint", "\\iint", "\\lim", "\\bigcup", "\\bigcap", "\\frac{d}", "\\partial")
"""An answer that holds one of these is not worked out, unless the reference holds it too."""
_BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom", "\\choose", "\\Gamma")
_FUNCTIONS = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\arc", "\\exp")
_LETTERS = frozenset(string.ascii_letters)
_SYMBOLS = frozenset("π∞√×·÷±∓≤≥≠°∪∩∈∅−–αβγδεθλμφψωΔ½¼¾²³′ℝℤℚℕℂ")
"""Beyond ASCII, only these are read in an expression; other scripts' digits and invisible marks are not."""
_ASCII = frozenset(map(chr, range(32, 127)))


def too_hard(answer: str, reference: str) -> str:
    """Return why the answer is not handed on, "" if it is. Example: "a number of 4000 digits"

    A reference beyond the limits raises none of them for its answers, but may use the calculus that it uses itself.
    """
    if len(answer) > MAX_LENGTH:
        return f"{len(answer)} characters"
    strange = next((char for char in answer if char not in _ASCII and char not in _SYMBOLS), "")
    if strange:
        return f"the character U+{ord(strange):04X}"
    calculus = next((command for command in CALCULUS if command in answer and command not in reference), "")
    return calculus or _shape(answer) or _counts(answer) or _words(answer) or _numbers(answer)


def _counts(text: str) -> str:
    for what, signs, limit in (
        ("powers", ("^",), MAX_POWERS),
        ("list items", (",", ";", "&", "\\\\"), MAX_LISTED),
        ("roots", ("\\sqrt", "√"), MAX_ROOTS),
        ("commands", ("\\",), MAX_COMMANDS),
        ("factorials", ("!",), 4),
        ("factorials of factorials", ("!!", "! !"), 0),
        ("absolute values", ("|",), 8),
        ("equal signs", ("=",), 6),
        ("primes", ("'",), 4),
        ("subscripts", ("_",), 12),
        ("signs in a row", ("--", "- -", "+-", "-+", "++"), 3),
    ):
        count = sum(text.count(sign) for sign in signs)
        if count > limit:
            return f"{count} {what}"
    return ""


def _power_digits(text: str) -> float:
    """Digits of the largest written number that is raised to a written power."""
    most = 0.0
    for i in (i for i, char in enumerate(text) if char == "^" and text[:i].rstrip()[-1:] not in _LETTERS):
        operand = _operand(text, i + 1)
        bases, exponents = _literals(text[:i].rstrip(" })")), _literals(operand)
        if bases and exponents:
            base, exponent = int(text[slice(*bases[-1])]), int(operand[slice(*exponents[0])])
            most = max(most, math.log10(max(1, base)) * exponent)
    return most


def _words(text: str) -> str:
    """Letters that are no command: an expression has few, and none in a row."""
    runs = [len(run) for run in re.findall("[A-Za-z]+", _without_commands(text))]
    total, longest = sum(runs), max(runs, default=0)
    if longest > MAX_WORD or total > MAX_LETTERS:
        return f"{total} letters outside commands, {longest} in a row"
    return ""


def _shape(text: str) -> str:
    """Nesting that is too deep or does not balance. Parentheses may close with brackets: (0, 1] is an interval."""
    depth = deepest = braces = 0
    lowered: list[bool] = []  # of each open bracket: is it a subscript's
    previous = ""
    escaped = False
    for char in text:
        before, previous = previous, char if char != " " else previous
        if escaped:
            escaped = False
            if char in "{}":
                continue
        if char == "\\":
            escaped = True
        elif char in "{([":
            depth += 1
            braces += char == "{"
            deepest = max(deepest, depth)
            lowered.append(before == "_")
            if sum(lowered) > MAX_SUBSCRIPTS:
                return f"subscripts {sum(lowered)} deep"
        elif char in "})]":
            depth -= 1
            braces -= char == "}"
            if depth < 0 or braces < 0:
                return "brackets that do not balance"
            lowered.pop()
    if depth or braces:
        return "brackets that do not balance"
    return f"brackets {deepest} deep" if deepest > min(MAX_NESTING, MAX_DEPTH) else ""


def _numbers(text: str) -> str:
    """Literals, exponents, factorials and binomials that are too large to work out."""
    literals = _literals(text)
    if len(literals) > MAX_NUMBERS:
        return f"{len(literals)} numbers"
    for start, end in literals:
        size = end - start
        if size > MAX_LITERAL:
            return f"a number of {size} digits"
        value = int(text[start:end])
        if value > MAX_ARGUMENT and text[end:].lstrip(" })").startswith("!"):
            return f"the factorial of {value}"
        if value > MAX_EXPONENT and text[:start].rstrip("+-").endswith(("e", "E")):
            return f"the exponent {value}"
        if text[end:].lstrip().startswith("_"):
            return "a subscript on a number"
    largest = max((int(text[a:b]) for a, b in literals), default=0)
    spaced = text.replace(" ", "")
    if (")!" in spaced or "}!" in spaced) and (largest > SMALL or "^" in text or text.count("!") > 1):
        return "the factorial of an expression with large numbers"
    digits = _power_digits(text)
    if digits > MAX_LITERAL and any(command in text for command in _FUNCTIONS):
        return f"a function of a number of {digits:.0f} digits"
    growing = largest > MAX_ARGUMENT or digits > math.log10(MAX_ARGUMENT)
    if growing and any(command in text for command in _BINOMIALS):
        return "a binomial coefficient or gamma function of large numbers"
    return _exponents(text)


def _exponents(text: str) -> str:
    """Return an exponent that is too large. An exponent that has a power or a factorial in it may have no large number."""
    degree = 1
    for i, char in enumerate(text):
        if char != "^":
            continue
        exponent = _operand(text, i + 1)
        values = [int(exponent[a:b]) for a, b in _literals(exponent)]
        if not values:
            continue
        if "^" in exponent or "!" in exponent:
            if _tower(values) > MAX_EXPONENT:
                return "a tower of powers"
        elif _product(values) > MAX_EXPONENT and "/" not in exponent and "frac" not in exponent:
            return f"the exponent {exponent.strip('{}')[:20]}"
        grouped = text[:i].rstrip().endswith((")", "]", "}"))
        if grouped and _has_variables(text[:i]):
            degree *= max(1, *values)
            if max(values) > MAX_POWERS or degree > MAX_DEGREE:
                return f"sums to powers that make {degree}"
    if text.count("^") > 1 and "}^" in text.replace(" ", "") and _chained(text):
        return "a tower of powers"
    return ""


def _chained(text: str) -> bool:
    """Powers of powers, written one after the other: 9^9^9 or {9^{9}}^{9}, with numbers that multiply up."""
    values = [int(text[a:b]) for a, b in _literals(text)]
    return not _has_variables(text) and _product(values) > MAX_EXPONENT * 1000


def _has_variables(text: str) -> bool:
    return any(char in _LETTERS for char in _without_commands(text))


def _operand(text: str, i: int) -> str:
    """Return what an exponent sign at i - 1 applies to: a group, a command with its groups, or a character; and a power of it."""
    while i < len(text) and text[i] == " ":
        i += 1
    start, depth = i, 0
    while i < len(text):
        char = text[i]
        depth += (char in "{(") - (char in "})")
        if depth < 0:
            break
        i += 1
        goes_on = text[i : i + 1] in ("^", "{", "(") or char in "^\\" or (char in DIGITS and text[i : i + 1] in DIGITS)
        if depth == 0 and not goes_on:
            break
    return text[start:i]


def _literals(text: str) -> list[tuple[int, int]]:
    """Start and end of each run of digits."""
    return [found.span() for found in re.finditer("[0-9]+", text)]


def _tower(values: list[int]) -> float:
    """Return an upper bound of powers of these numbers, outermost last; infinity beyond what a float holds."""
    bound = 1.0
    for value in reversed(values):
        if bound > 64 or value > 10**6:
            return float("inf") if value > 1 else 1.0
        bound = float(max(value, 1)) ** bound
    return bound


def _product(values: list[int]) -> int:
    return math.prod(max(1, value) for value in values)


def _without_commands(text: str) -> str:
    """Text without the names of LaTeX commands, so that the letters left are variables."""
    return re.sub(r"\\[A-Za-z]*", "", text)
