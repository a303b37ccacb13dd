"""A user-defined task: a class in a Python file with the methods of lockstep.types.Task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from lockstep.config import schema
from lockstep.data.questions import question_digest
from lockstep.errors import LockstepError, TaskError
from lockstep.tasks.base import VerifiedTask
from lockstep.types import Prompt, Task
from lockstep.user_code import describe
from lockstep.verifiers.python import UserFunction, check_call, check_sendable, load_class, make_object, with_seed

METHODS = {"batch": ("step", "size"), "heldout": ("role", "size"), "grade": ("prompt", "reply")}


class UserTask(VerifiedTask):
    """Calls the user's task and checks its results. Mistakes of the task become TaskErrors or unscored replies.

    Replies are graded in worker processes, by other objects of the class made with the same settings: data that `batch` keeps
    in the object is missing there, and a `grade` that hangs, dies or exhausts memory costs only its own sample.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, task: Task, file: Path, grader: UserFunction) -> None:
        self.name = task.name
        self._task = task
        self._file = file
        self.verifier = grader
        self._asked: dict[bytes, str] = {}
        self._held_out: dict[bytes, str] = {}

    def batch(self, step: int, size: int) -> Sequence[Prompt]:
        """Return a step's prompts. Raises TaskError unless the task gives `size` different prompts, none of them held out."""
        prompts = self._prompts(lambda: self._task.batch(step, size), f"batch({step}, {size})", size)
        self._refuse_shared(prompts, self._asked, self._held_out, "held out")
        return prompts

    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        """Return held-out prompts. Raises TaskError unless the task gives `size` different prompts, none of them trained on."""
        prompts = self._prompts(lambda: self._task.heldout(role, size), f"heldout({role!r}, {size})", size)
        self._refuse_shared(prompts, self._held_out, self._asked, "trained on")
        return prompts

    def _prompts(self, call: Callable[[], Sequence[Prompt]], what: str, size: int) -> tuple[Prompt, ...]:
        where = f"{self._file}, {what}"
        try:
            prompts = tuple(call())
        except LockstepError:
            raise
        except (Exception, SystemExit) as error:
            raise TaskError(
                f"the task's method failed: {describe(error, self._file)}", where=where, fix="correct the method"
            ) from error
        strange = next((item for item in prompts if not isinstance(item, Prompt)), None)
        if strange is not None:
            raise TaskError(
                f"the task returned an object of type {type(strange).__name__}, not a Prompt",
                where=where,
                fix="return lockstep.types.Prompt objects",
            )
        if len(prompts) != size:
            raise TaskError(
                f"the task returned {len(prompts)} prompts, but {size} were requested",
                where=where,
                fix=f"return {size} prompts",
            )
        for prompt in prompts:
            _require_text(prompt, where)
            check_sendable(prompt, where)
        if len({prompt.id for prompt in prompts}) < size:
            raise TaskError("two of the prompts have the same id", where=where, fix="give each prompt an id of its own")
        return prompts

    def _refuse_shared(
        self, prompts: tuple[Prompt, ...], mine: dict[bytes, str], others: dict[bytes, str], verb: str
    ) -> None:
        for prompt in prompts:
            digest = self._digest(prompt)
            if digest in others:
                raise TaskError(
                    f"the question {prompt.id} is also {verb}, as {others[digest]}",
                    where=str(self._file),
                    fix="change the task so that batch and heldout never return the same question",
                )
            mine[digest] = prompt.id

    def _digest(self, prompt: Prompt) -> bytes:
        return question_digest(prompt.messages)


def _require_text(prompt: Prompt, where: str) -> None:
    """Raise TaskError unless the prompt's id and answer are text and its messages turns of text; Python checks none of these."""
    turns: object = prompt.messages
    if not (isinstance(turns, list | tuple) and turns and all(_is_turn(turn) for turn in turns)):
        raise TaskError(
            f"the messages of prompt {prompt.id} are not turns with a role and a content of text",
            where=where,
            fix='return messages=({"role": "user", "content": "2 * 3 ="},)',
        )
    for name, value in (("id", prompt.id), ("answer", prompt.answer)):
        if not isinstance(value, str):
            raise TaskError(
                f"the {name} of prompt {prompt.id} is of type {type(value).__name__}, not text",
                where=where,
                fix=f"return {name}=str(...)",
            )


def _is_turn(turn: object) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def build_python_task(settings: schema.PythonTask, seed: int) -> UserTask:
    """Return an object of the class `file.py:Class`, made with the task's settings, and the run's seed if it takes `seed`.

    Raises TaskError if the class is missing, cannot be made with these settings, here or in a worker process, or lacks a method
    of the protocol.
    """
    made = load_class(settings.path)
    arguments = with_seed(made, settings.settings, seed)
    task = as_task(make_object(made, arguments, settings.path), settings.path)
    file = Path(settings.path.rpartition(":")[0]).expanduser()
    return UserTask(task, file, UserFunction(settings.path, settings.grading, arguments))


def user_grader(settings: schema.PythonTask, seed: int) -> UserFunction:
    """Return what grades as the task that `build_python_task` returns. Raises TaskError as that does.

    The file runs in the processes that grade alone: a worker that trains must not be changed by it.
    """
    return UserFunction(settings.path, settings.grading, settings.settings, seed)


def as_task(made: object, path: str) -> Task:
    """Return an object of the user's class as a task. Raises TaskError if it lacks a method of the protocol, or a name."""
    for method, parameters in METHODS.items():
        function = getattr(made, method, None)
        if not callable(function):
            raise TaskError(
                f"the task's class has no method {method}",
                where=path,
                fix=f"define {method}(self, {', '.join(parameters)})",
            )
        check_call(function, parameters, f"{path}.{method}")
    if not isinstance(getattr(made, "name", None), str) or not cast(Task, made).name:
        raise TaskError("the task has no name", where=path, fix='set one in its class: self.name = "my_task"')
    return cast(Task, made)
