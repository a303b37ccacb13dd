"""Tools: Python functions that replies may call, with the JSON schemas that the model is shown."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from lockstep.codec import strict_json
from lockstep.config import tools as schema
from lockstep.envs.calculator import calculator
from lockstep.envs.calls import BadCall, Call
from lockstep.envs.mcp_tools import McpServer
from lockstep.errors import TaskError
from lockstep.user_code import describe, load_object
from lockstep.verifiers.structured import check_schema

MAX_RESULT = 8000
"""Most characters of a result that the model is shown."""
BUILT_IN: Mapping[str, Callable[..., object]] = {"calculator": calculator}
"""Tools that need no file and no separate process: they end in microseconds, whatever their input."""

Check = Callable[[Mapping[str, object]], Mapping[str, object]]
"""Maps arguments of a call to arguments of the function; raises ValueError."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with its schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""
    function: Callable[..., object]
    check: Check

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments by name; {} for one that is true or false, as JSON Schema allows."""
        found = self.parameters.get("properties", {})
        return {name: one if isinstance(one, dict) else {} for name, one in found.items()}

    @property
    def schema(self) -> dict[str, Any]:
        """Schema in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a call, as the model reads it."""

    text: str
    failed: bool = False


def build_tools(settings: Sequence[schema.Tool | schema.McpServer]) -> dict[str, Tool]:
    """Return the tools by name. Raises TaskError for a missing file, function or server, and for two of one name."""
    tools: dict[str, Tool] = {}
    for tool in (tool for one in settings for tool in _built(one)):
        if tool.name in tools:
            raise TaskError(f"two tools are called {tool.name}", where="task.tools", fix="rename one of them")
        tools[tool.name] = tool
    return tools


def _built(settings: schema.Tool | schema.McpServer) -> list[Tool]:
    if isinstance(settings, schema.Tool):
        return [build_tool(settings)]
    server, where = McpServer(settings), f"mcp: {settings.mcp}"
    return [
        Tool(
            one.name,
            " ".join((one.description or "").split()),
            one.input_schema,
            server.caller(one.name),
            _by_schema(one.input_schema, f"{where}, {one.name}"),
        )
        for one in server.listed()
    ]


def build_tool(settings: schema.Tool) -> Tool:
    """Return a function with its schema from the settings, or else from its signature and docstring."""
    if settings.path in BUILT_IN:
        function = BUILT_IN[settings.path]
    else:
        found = load_object(settings.path)
        if not callable(found) or inspect.isclass(found) or inspect.iscoroutinefunction(found):
            raise TaskError(
                "the path does not name a plain function",
                where=settings.path,
                fix="give a function that is defined with def, written file.py:function",
            )
        function = found
    summary, described = _docstring(function)
    if settings.parameters is None:
        try:
            model = _model_of(function, described, settings.path)
            parameters, check = model.model_json_schema(), _by_model(model)
        except PydanticUserError as error:
            raise TaskError(
                f"no JSON schema can be made of the tool's parameters: {str(error).splitlines()[0]}",
                where=settings.path,
                fix="annotate them with types of JSON, under names without a leading _; or set the tool's `parameters`",
            ) from error
        parameters.pop("title", None)
    else:
        parameters, check = settings.parameters, _by_schema(settings.parameters, settings.path)
    name = settings.name or str(getattr(function, "__name__", "tool"))
    return Tool(name, settings.description or summary, parameters, function, check)


def run_call(tools: Mapping[str, Tool], call: Call | BadCall) -> Result:
    """Run a call. Errors are reported to the model: a wrong name or argument, and exceptions of the function."""
    if isinstance(call, BadCall):
        return Result(f"error: {call.why}", failed=True)
    tool = tools.get(call.name)
    if tool is None:
        return Result(f"error: there is no tool {call.name!r}; there are {', '.join(tools)}", failed=True)
    try:
        arguments = tool.check(_by_name(tool, call.arguments))
    except ValueError as error:
        return Result(f"error: {error}", failed=True)
    try:
        return Result(_as_text(tool.function(**arguments)))
    except (Exception, SystemExit) as error:
        return Result(f"error: {describe(error, None)}", failed=True)


def _by_name(tool: Tool, arguments: Mapping[str, object] | str) -> Mapping[str, object]:
    """Return arguments of a plain call by name: an object, name=value pairs, the only argument as it is, or a list in order."""
    if not isinstance(arguments, str):
        return arguments
    names = list(tool.properties)
    if not arguments:
        return {}
    if (named := _named(arguments)) is not None and named.keys() <= set(names):
        return named
    if len(names) == 1:
        text = arguments.partition("=")[2] if re.match(rf"{re.escape(names[0])}\s*=", arguments) else arguments
        return {names[0]: _value(text.strip(), as_text=tool.properties[names[0]].get("type") == "string")}
    try:
        values = json.loads(f"[{arguments}]")
    except (json.JSONDecodeError, RecursionError):
        values = [part.strip() for part in arguments.split(",")]
    if len(values) == 1 and isinstance(values[0], dict):
        return values[0]
    if len(values) > len(names):
        raise ValueError(f"{tool.name} takes {len(names)} arguments, not {len(values)}")
    return dict(zip(names, values, strict=False))


def _named(arguments: str) -> dict[str, object] | None:
    """Read an object, or name=value pairs with literal values; None for anything else."""
    try:
        value = strict_json(arguments, finite=True)
    except ValueError:
        try:
            call = ast.parse(f"f({arguments})", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or not call.keywords:
                return None
            return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
            return None
    return value if isinstance(value, dict) else None


def _value(text: str, *, as_text: bool) -> object:
    try:
        value = ast.literal_eval(text) if re.fullmatch(r"'[^'\\\n]*'", text) else json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    return text if as_text and not isinstance(value, str) else value


def _model_of(function: Callable[..., object], described: Mapping[str, str], where: str) -> type[BaseModel]:
    """Return a model with the function's parameters as fields. Raises TaskError for parameters that no call can name."""
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise TaskError(
            f"the tool's annotations cannot be read: {error}",
            where=where,
            fix="import the names that the annotations use",
        ) from error
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TaskError(
                f"the tool's parameter {parameter} cannot be given by name",
                where=where,
                fix="replace *args, **kwargs and positional-only parameters by named ones",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, str), Field(default, description=described.get(name)))
    model: type[BaseModel] = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    return model


def _by_model(model: type[BaseModel]) -> Check:
    def check(arguments: Mapping[str, object]) -> Mapping[str, object]:
        try:
            found = model.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
        return {name: getattr(found, name) for name in model.model_fields}

    return check


def _by_schema(parameters: Mapping[str, Any], where: str) -> Check:
    from jsonschema.validators import SPECIFICATIONS, validator_for

    check_schema(parameters, "the schema of the tool's parameters", where, "that schema")
    validator = validator_for(parameters)(parameters, registry=SPECIFICATIONS)

    def check(arguments: Mapping[str, object]) -> Mapping[str, object]:
        for error in validator.iter_errors(dict(arguments)):
            raise ValueError(f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message}")
        return arguments

    return check


def _docstring(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """Return the first paragraph, and the lines of `Args:` by parameter."""
    text = inspect.getdoc(function) or ""
    summary = " ".join(text.partition("\n\n")[0].split())
    arguments = re.search(r"^Args:\n((?:[ \t]+.*\n?)+)", text, re.MULTILINE)
    lines = arguments.group(1).splitlines() if arguments else []
    named = (re.match(r"\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line) for line in lines)
    return summary, {found.group(1): found.group(2) for found in named if found}


def _as_text(result: object) -> str:
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}… ({len(text)} characters)"
