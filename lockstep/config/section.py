"""The base class of every group of settings."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import shlex
import sys
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

TAG = "kind"
"""The field that names the variant wherever a section has several."""

Json: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None


def _possible(text: str) -> str:
    """Return a path. Raises ValueError for one in the home of no user, or with a name that no file can have."""
    home = os.path.expanduser(text)  # noqa: PTH111  # Path.expanduser raises for an unknown user
    if home.startswith("~"):
        raise ValueError(f"{home.split('/')[0]} is not a user of this machine; a folder called so is written ./~…")
    if any(len(os.fsencode(part)) > 255 for part in home.split("/")):
        raise ValueError("the name of a file or folder has at most 255 bytes")
    return text


PathText: TypeAlias = Annotated[str, AfterValidator(_possible)]
"""A file or folder as the user wrote it; ~ at its beginning is the folder of the user."""
Place: TypeAlias = Annotated[PathText, AfterValidator(os.path.expanduser)]
"""A file or folder, with the user's folder in place of ~."""
CodePath: TypeAlias = Annotated[str, Field(pattern=r".+\.py:\w+$"), AfterValidator(_possible)]
"""A function or class in a file of the user's: file.py:NAME."""


def command_words(text: str) -> list[str]:
    """Return a program and its arguments; `python` alone is the one that runs Lockstep, whatever PATH says."""
    program, *arguments = shlex.split(text) or [""]
    return [sys.executable if program == "python" else program, *arguments]


def _command(text: str) -> str:
    try:
        program = command_words(text)[0]
    except ValueError as error:
        raise ValueError(f"the command cannot be read as a shell reads it: {error}") from error
    if not program:
        raise ValueError("the command is empty: name a program")
    return text


Command: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_command)]
"""A program and its arguments, quoted as for a shell: see `command_words`."""


def _add_meanings(schema: dict[str, Any], section: type[BaseModel]) -> None:
    for name, text in meanings(section).items():
        schema["properties"][name]["description"] = text


class Section(BaseModel):
    """A frozen group of settings. The text under a setting is its meaning: see `meanings`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, json_schema_extra=_add_meanings)


class ShortSection(Section):
    """A section for which a text may stand: the value of its field SHORT."""

    SHORT: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {cls.SHORT: value} if isinstance(value, str) else value


@functools.cache
def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each setting that has one: its `description`, or the text under it, its own or inherited.

    The source is read when asked for: pydantic's `use_attribute_docstrings` reads it at every start of the program.
    """
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if issubclass(each, Section) and each is not Section:
            found |= _texts(each)
    given = {name: field.description for name, field in section.model_fields.items() if field.description}
    return {name: text for name, text in (found | given).items() if name in section.model_fields}


def _texts(section: type[BaseModel]) -> dict[str, str]:
    """Return the texts under the settings of a class's own; none for a class that was made by a call."""
    tree = _classes(section.__module__).get(section.__qualname__)
    return {
        setting.target.id: inspect.cleandoc(text.value.value)
        for setting, text in itertools.pairwise(tree.body if tree else [])
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by their qualified names, none without its source; it is read once for all of them."""
    found: dict[str, ast.ClassDef] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # a notebook's, or a module that is not registered
        return found

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, f"{prefix}{child.name}.<locals>." if isinstance(child, ast.FunctionDef) else prefix)

    visit(ast.parse(source), "")
    return found
