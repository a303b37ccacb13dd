"""Tables of docs/coming_from.md: `python -m tests.docs.translation_table` writes them into the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lockstep.config.foreign_settings import SYSTEMS, Entry, table
from lockstep.config.text import quoted

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def markdown() -> Iterator[str]:
    """Yield the tables of docs/coming_from.md: each setting there, and what it is here."""
    for system, title in SYSTEMS.items():
        yield f"### {title}\n"
        yield f"Sources: {'; '.join(dict.fromkeys(entry.source for entry in table()[system]))}.\n"
        yield "| there | default there | here | change |\n|---|---|---|---|"
        for entry in table()[system]:
            if entry.name[0] == "?":
                continue
            names = " or ".join(f"`{name}`" for name in (entry.name, *entry.old))
            here = (
                f"`{entry.ours}`"
                if entry.ours
                else entry.here or (entry.idle and f"no effect there: {entry.idle}") or "–"
            )
            there = "" if entry.there is None else f"`{quoted(entry.there)}`"
            change = "; ".join(filter(None, (entry.unit, _words(entry), *entry.unless.values(), entry.missing)))
            yield f"| {names} | {there} | {here} | {change} |".replace("\n", " ")
        yield ""


def _words(entry: Entry) -> str:
    shown = {there: ours for there, ours in entry.values.items() if ours != {}}
    return ", ".join(
        f"`{there}`: {ours[1:] if isinstance(ours, str) and ours[0] == '!' else f'`{quoted(ours, 90)}`'}"
        for there, ours in shown.items()
    )


def page() -> str:
    """Return the page with the tables as they are now."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join(markdown()) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
