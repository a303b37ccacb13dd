"""Pieces of HTML. Everything that comes from a run goes through `text`, so that no reply can become markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from lockstep.track.text import visible

LONGEST = 6000
"""Characters of one text on the page."""


def text(value: object) -> str:
    """Any value as text of the page: escaped, control characters and lone surrogates shown as escapes."""
    return escape(visible(str(value)), quote=True)


def long_text(value: str) -> str:
    """A text in a box, cut after LONGEST characters with a count of what is missing."""
    rest = len(value) - LONGEST
    more = f'<p class="soft">… {rest} more characters are in the rollouts file</p>' if rest > 0 else ""
    return f"<pre>{text(value[:LONGEST])}</pre>{more}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, style: str = "") -> str:
    """A table of plain values; `style` is a class of style.css."""
    head = "".join(f"<th>{text(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = f' class="{style}"' if style else ""
    return f'<div class="scroll"><table{kind}><tr>{head}</tr>{body}</table></div>'


def facts(rows: Sequence[tuple[str, object]]) -> str:
    """Names and values in a grid."""
    cells = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows)
    return f'<dl class="facts">{cells}</dl>'


def section(title: str, body: str) -> str:
    """A heading and what stands under it; nothing at all if that is empty."""
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def note(value: str) -> str:
    return f'<p class="note">{text(value)}</p>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def page(title: str, body: str) -> str:
    """A whole document that loads nothing: the policy in its head forbids scripts and addresses."""
    style = resources.files("lockstep.report").joinpath("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{text(title)}</title><style>{style}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'
