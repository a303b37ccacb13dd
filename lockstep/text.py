"""Text of unknown origin (model replies, file names) made safe to show."""

from __future__ import annotations

import unicodedata

KEPT = {"\n", "\t"}
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that a terminal may act on, or that do not show: controls, direction marks, surrogates, …"""


def visible(text: str) -> str:
    """The text with everything that a terminal would act on written as an escape: "\\x1b[2J" becomes "\\\\x1b[2J".

    Newlines and tabs stay; so do all letters, marks and emoji of any script.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in KEPT or unicodedata.category(c) not in HIDDEN else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
