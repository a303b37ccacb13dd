"""Loads user code: an object of a Python file, given as file.py:name. Also lists the files that the code consists of."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, TaskError
from lockstep.text import did_you_mean, reason_of


def load_object(spec: str, failure: type[LockstepError] = TaskError) -> object:
    """Run the file and return the object of that name. `spec` is file.py:name, relative to the current folder.

    Raises `failure` if the file is missing, does not run, or has no such name. The file runs with full rights: it is
    the user's own code.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise failure(
            "there is no such file", where=spec, fix=f"correct the path; a relative one begins in {Path.cwd()}"
        )
    names = vars(_run(path, failure))
    if name not in names:
        public = [known for known in names if not known.startswith("_")]
        hint = did_you_mean(name, public, f"define {name} there", most=3, cutoff=0.5)
        raise failure(f"{path} has no {name}", where=spec, fix=hint)
    return names[name]


def load_callable(
    spec: str, failure: type[LockstepError] = TaskError, fix: str = "give a function, written file.py:function"
) -> Callable[..., Any]:
    """Load an object that can be called. Raises `failure` as `load_object` does, and for an object that cannot."""
    found = load_object(spec, failure)
    if not callable(found):
        raise failure(f"the path names an object of type {type(found).__name__}, not a function", where=spec, fix=fix)
    return found


def signature_of(
    function: Callable[..., Any], where: str, failure: type[LockstepError] = TaskError
) -> inspect.Signature:
    """Return the signature of a user's function. Raises `failure` for one that is written in C and does not say."""
    try:
        return inspect.signature(function)
    except ValueError as error:
        what, fix = f"its parameters are not known: {error}", "call it in a function of your own, and name that"
        raise failure(what, where=where, fix=fix) from error


def texts_of(value: object) -> Iterator[str]:
    """Yield every text among settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_of(item)


def named_file(text: str) -> Path | None:
    """Return the file that a setting names; None for any other text."""
    try:
        path = Path(text).expanduser()
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a prompt: too long for a name, or ~ before what is no user
        return None


def code_files(texts: Iterable[str]) -> list[Path]:
    """Return the files of those texts that have the form file.py:name, with the files of the same folder that they import."""
    found: list[Path] = []
    waiting = [path for text in texts if ".py:" in text and (path := named_file(text.rpartition(":")[0]))]
    while waiting:
        path = waiting.pop(0)
        if path.suffix == ".py" and path.is_file() and path not in found:
            found.append(path)
            for name in _imported(path):
                waiting += [path.with_name(f"{name}.py"), path.parent / name / "__init__.py"]
    return found


def code_hash(texts: Iterable[str]) -> str:
    """Hash the content of `code_files`, whatever their folder is called. Returns 8 hex digits; "" if there are none."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in code_files(texts)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:8] if digests else ""


def _imported(path: Path) -> list[str]:
    """Return the first parts of the modules that a file imports, in order; nothing if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError, RecursionError):
        return []
    plain = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    return [name.split(".")[0] for name in [*plain, *(n.module or "" for n in nodes if isinstance(n, ast.ImportFrom))]]


def _run(path: Path, failure: type[LockstepError]) -> object:
    module_name = "lockstep_user_" + hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise failure("Python cannot load this file", where=str(path), fix="give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise failure(
            f"the file does not run: {describe(error, path)}",
            where=str(path),
            fix=f"run it alone to see the whole error: python {path}",
        ) from error
    return module


def describe(error: BaseException, path: Path | None) -> str:
    """Return an error in one line: type, message, and the last line of `path` that it passed. Never raises itself."""
    text = reason_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path is not None and _same(frame.filename, path)]
    if lines:
        return f"{text} ({path}:{lines[-1]})"
    return f"{text} (line {error.lineno})" if isinstance(error, SyntaxError) else text


def _same(filename: str, path: Path) -> bool:
    return filename == str(path) or Path(filename) == path.resolve()
