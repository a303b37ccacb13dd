"""Text of unknown origin (model replies, file names) made safe to show."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from urllib.parse import parse_qsl, urlsplit

KEPT = {"\n", "\t"}
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that a terminal may act on, or that do not show: controls, direction marks, surrogates, …"""

_SECRET = (
    r"(?:[\w.-]{0,200}[-_.])?(?:(?:api|access)?[-_]?key|\w{0,20}token|secret|passwd|password|pwd|credentials?|auth"
    r"|authorization|sig|signature)"
)
SECRET_NAME = re.compile(rf"(?i){_SECRET}")
"""Whole names of settings, options and query fields whose values are not to be shown."""
_IN_ADDRESS = re.compile(rf"(?i)(://)[^/?#@\s]+(?=@)|([?&;#]{_SECRET}=)[^&;#\s\"']+")


SHORTEST = 8
"""Shorter values of secrets are left in texts: they may be words."""
FOLDERS = ("PWD", "OLDPWD")
"""Variables with the name of a password that hold a folder."""


def secret_in(text: str) -> str:
    """Return the name of a likely secret in an address (scheme://…): a query field, or a password; "" if nothing does."""
    if not re.match(r"[A-Za-z][\w+.-]*://\S+$", text):
        return ""
    try:
        parts = urlsplit(text)
    except ValueError:  # no address after all
        return ""
    if "@" in parts.netloc:
        return "user and password"
    fields = parse_qsl(f"{parts.query}&{parts.fragment}")
    return next((name for name, value in fields if value and SECRET_NAME.fullmatch(name)), "")


def hide_secrets(text: str) -> str:
    """Return the text with the secrets in its addresses replaced by ***."""
    return _IN_ADDRESS.sub(lambda found: f"{found[1] or found[2]}***", text)


def hide_values(text: str) -> str:
    """Return the text without the values of environment variables whose names say that they are secret, and without secrets in
    addresses."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and value in text and name not in FOLDERS and SECRET_NAME.fullmatch(name):
            text = text.replace(value, "***")
    return hide_secrets(text)


def reason_of(error: BaseException, longest: int = 300) -> str:
    """Return another library's error, or one of a user's code, as one line of limited length. Never raises itself."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    words = [f"{type(error).__name__}:", *message.split()] if message.strip() else [type(error).__name__]
    text = " ".join(words).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= longest else f"{text[:longest]}…"


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a question for the `most` nearest of the known names, or `otherwise`. Example: "did you mean gsm8k or math?"."""
    near = get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def visible(text: str) -> str:
    """Return the text with everything that a terminal would act on written as an escape: "\\x1b[2J" becomes "\\\\x1b[2J".

    Newlines and tabs stay; so do all letters, marks and emoji of any script.
    """
    if text.isascii() and text.isprintable():
        return text
    shown = (
        c if c in KEPT or unicodedata.category(c) not in HIDDEN else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(shown)
