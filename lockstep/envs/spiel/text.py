"""Describes a state to the model as text, and reads the move from its reply; only an exact name of a legal move counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, assert_never

from lockstep.envs.spiel.states import moves_of, shown
from lockstep.types import Message
from lockstep.verifiers.base import MAX_SHOWN

Format: TypeAlias = Literal["tag", "line", "reply"]

OPEN, CLOSE = "<move>", "</move>"
MARKS: Mapping[str, tuple[str, ...]] = {
    "breakthrough": ("b", "w"),
    "checkers": ("o", "+"),
    "chess": ("black", "white"),  # in FEN: lower and upper case
    "clobber": ("o", "x"),
    "connect_four": ("x", "o"),
    "dots_and_boxes": ("P1", "P2"),
    "go": ("B, shown as X", "W, shown as O"),
    "hex": ("x", "o"),
    "othello": ("x", "o"),
    "tic_tac_toe": ("x", "o"),
}
"""Marks of OpenSpiel's first and second player on the board. Other games use the player's number."""
_ANSWERS: Mapping[Format, str] = {
    "tag": f"End with your move, written as it is listed: {OPEN}…{CLOSE}",
    "line": "Put your move alone in the last line, written as it is listed.",
    "reply": "Answer with one move only, written as it is listed.",
}
_UNLISTED: Mapping[Format, str] = {
    "tag": f"End with your move in OpenSpiel's notation: {OPEN}…{CLOSE}",
    "line": "Put your move alone in the last line, in OpenSpiel's notation.",
    "reply": "Answer with one move only, in OpenSpiel's notation.",
}


def question(state: Any, case: str, answer: Format, *, show_moves: bool) -> tuple[Message, ...]:
    """Return the whole question: game, board, side to move, legal moves, and the answer format."""
    lines = [f"Game: {case}", shown(state), f"To move: {mover(state)}"]
    if show_moves:
        lines.append(f"Legal moves: {', '.join(moves_of(state))}")
    lines.append((_ANSWERS if show_moves else _UNLISTED)[answer])
    return (Message(role="user", content="\n".join(lines)),)


def mover(state: Any) -> str:
    """Return the side to move. Example: "o (player 2 of 2)" """
    game, player = state.get_game(), state.current_player()
    number = f"player {player + 1} of {game.num_players()}"
    marks = MARKS.get(game.get_type().short_name)
    return f"{marks[player]} ({number})" if marks is not None else number


def read_move(reply: str, answer: Format) -> str | None:
    """Return the text in the place of the move, without spaces around it; None if there is none. Any text there is one: its
    legality is not checked here.

    A reply with two moves gives none, nor does one that continues after its tag. Time grows linearly with the reply.
    """
    match answer:
        case "tag":
            found = _tagged(reply)
        case "line":
            found = reply.rstrip().rpartition("\n")[2].strip()
        case "reply":
            found = reply.strip()
        case _:
            assert_never(answer)
    return found if 0 < len(found) <= MAX_SHOWN else None


def written(move: str, answer: Format) -> str:
    """Return a reply that gives this move."""
    return f"{OPEN}{move}{CLOSE}" if answer == "tag" else move


def _tagged(reply: str) -> str:
    """Return what is in the tag; "" unless there is exactly one, at the end."""
    if reply.count(OPEN) != 1 or reply.count(CLOSE) != 1:
        return ""
    before, _, rest = reply.partition(OPEN)
    inside, _, after = rest.partition(CLOSE)
    return "" if CLOSE in before or after.strip() else inside.strip()
