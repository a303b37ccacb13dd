r"""Converts answers to exact numbers, and text to a normalised form. The table of cases is in docs/verifiers.md.

plain() removes the wrapping; what is left is a number only if it fits this grammar. Units,
currencies, mixed numbers and expressions are never guessed.

    value      = [sign] magnitude ["%" | "\%"]
    magnitude  = fraction | power | decimal
    fraction   = \frac{part}{part} | \frac D D | part / part          part = [sign] decimal; \dfrac and \tfrac too
    power      = decimal ("e" | "E") exponent | decimal (\times | \cdot | × | *) 10^exponent
    decimal    = digits ["." [digits]] | "." digits                   commas only between groups of three
"""

from __future__ import annotations

from fractions import Fraction

from lockstep.verifiers.extract import DIGITS, MINUS, REGION

MAX_DIGITS = 1000
MAX_EXPONENT = 10_000

_UNWRAPPED = ("\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac")
_TIMES = ("\\times", "\\cdot", "\u00d7", "*")
_PERCENT = ("\\%", "%")
_SPACES = ("\\,", "\\;", "\\:", "\\ ", "~")
_MAX_WRAPS = 8


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a written number, or None if it is not one or is beyond the limits. Linear; never raises."""
    if len(text) > REGION:
        return None
    body = plain(text.translate(MINUS))
    percent = next((sign for sign in _PERCENT if body.endswith(sign)), "")
    if percent:
        body = body[: -len(percent)].rstrip()
    sign, body = _sign(body)
    value = _magnitude(body)
    if value is None:
        return None
    return sign * (value / 100 if percent else value)


def close(value: Fraction, answer: Fraction, tolerance: float) -> bool:
    """Compare with the reference `answer`: |value - answer| <= tolerance · max(1, |answer|), in exact integers.

    To a whole number the tolerance is absolute, and another whole number is never close: 1000000.5 and 1000000 are not 1000001.
    """
    if value.denominator == 1 and answer.denominator == 1:
        return value == answer
    limit = Fraction(repr(tolerance))
    a, b, c, d = value.numerator, value.denominator, answer.numerator, answer.denominator
    scale = 1 if d == 1 else max(d, abs(c))
    return abs(a * d - c * b) * limit.denominator <= limit.numerator * scale * b


def plain(text: str) -> str:
    r"""Text without \text{…}-like commands, math delimiters, one trailing period, and outer whitespace. Linear."""
    # A row of a matrix ends with two backslashes: the second is not the one of a LaTeX space behind it.
    text = "\\\\".join(map(_spaced, _unwrap(text).split("\\\\"))).strip()
    text = text[:-1].rstrip() if text.endswith(".") else text
    for _ in range(_MAX_WRAPS):
        inner = _inside(text)
        if inner is None:
            break
        text = inner
    return text[:-1].rstrip() if text.endswith(".") else text


def normalise_text(text: str) -> str:
    """Text for comparison: plain, whitespace runs as one space, case folded."""
    return " ".join(plain(text).split()).casefold()


def _spaced(text: str) -> str:
    text = text.replace("{,}", ",").replace("\\!", "")
    for space in _SPACES:
        text = text.replace(space, " ")
    return text


def _unwrap(text: str) -> str:
    r"""Drop \text{ \textbf{ \mathrm{ \mathbf{ and the braces that close them, in one pass."""
    if "\\text" not in text and "\\math" not in text:
        return text
    kept: list[str] = []
    drop_closing: list[bool] = []
    i = 0
    while i < len(text):
        command = next((c for c in _UNWRAPPED if text.startswith(c, i)), "") if text[i] == "\\" else ""
        if command:
            drop_closing.append(True)
            i += len(command)
            continue
        if text[i] == "{":
            drop_closing.append(False)
        if text[i] != "}" or not drop_closing or not drop_closing.pop():
            kept.append(text[i])
        i += 1
    return "".join(kept)


def _inside(text: str) -> str | None:
    for opening, closing in _DELIMITERS:
        size = len(opening) + len(closing)
        if len(text) > size and text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : len(text) - len(closing)]
            return inner.strip() if opening not in inner else None
    return None


def _sign(text: str) -> tuple[int, str]:
    if text[:1] in ("+", "-"):
        return (-1 if text[0] == "-" else 1), text[1:].lstrip()
    return 1, text


def _magnitude(text: str) -> Fraction | None:
    """Return a number without its sign and percent."""
    if text.startswith(_FRACTIONS):
        return _latex_fraction(text[text.index("c") + 1 :].lstrip())
    if "/" in text:
        above, _, below = text.partition("/")
        return _ratio(above.rstrip(), below.lstrip(), signed_above=False)
    for times in _TIMES:
        mantissa, found, power = text.partition(times)
        if found:
            return _scaled(mantissa.rstrip(), _power_of_ten(power.lstrip()))
    mantissa, found, power = text.replace("E", "e").partition("e")
    return _scaled(mantissa, power) if found else _decimal(text)


def _latex_fraction(text: str) -> Fraction | None:
    r"""Return the fraction after \frac: {a}{b}, or two digits."""
    if len(text) == 2 and text[0] in DIGITS and text[1] in DIGITS:
        return _ratio(text[0], text[1])
    if not (text.startswith("{") and text.endswith("}")):
        return None
    above, found, below = text[1:-1].partition("}")
    below = below.lstrip()
    if not found or not below.startswith("{"):
        return None
    return _ratio(above.strip(), below[1:].strip())


def _ratio(above: str, below: str, *, signed_above: bool = True) -> Fraction | None:
    sign_above, above = _sign(above) if signed_above else (1, above)
    sign_below, below = _sign(below)
    numerator, denominator = _decimal(above), _decimal(below)
    if numerator is None or not denominator:
        return None
    return sign_above * sign_below * numerator / denominator


def _power_of_ten(text: str) -> str:
    """Return the exponent of 10^n or 10^{n}; a text that is no exponent if it is neither."""
    if not text.startswith("10^"):
        return ""
    exponent = text[3:]
    return exponent[1:-1] if exponent.startswith("{") and exponent.endswith("}") else exponent


def _scaled(mantissa: str, exponent: str) -> Fraction | None:
    value = _decimal(mantissa)
    sign, digits = _sign(exponent.strip())
    if value is None or not _all_digits(digits):
        return None
    digits = digits.lstrip("0") or "0"
    if len(digits) > len(str(MAX_EXPONENT)) or int(digits) > MAX_EXPONENT:
        return None
    power: int = 10 ** int(digits)
    return value * power if sign > 0 else value / power


def _decimal(text: str) -> Fraction | None:
    """Digits with an optional point; commas only between groups of three of the whole part."""
    whole, _, rest = text.partition(".")
    whole_digits = ungrouped(whole)
    if whole_digits is None or (rest and not _all_digits(rest)) or not (whole_digits or rest):
        return None
    if len(whole_digits) + len(rest) > MAX_DIGITS:
        return None
    return Fraction(int(whole_digits + rest), 10 ** len(rest))


def ungrouped(text: str) -> str | None:
    """Return 1,234,567 as 1234567; None for other characters or other grouping."""
    first, *groups = text.split(",")
    if not groups:
        return text if not text or _all_digits(text) else None
    digits = "".join([first, *groups])
    well_grouped = 1 <= len(first) <= 3 and all(len(group) == 3 for group in groups)
    return digits if well_grouped and _all_digits(digits) else None


def _all_digits(text: str) -> bool:
    return bool(text) and DIGITS.issuperset(text)
