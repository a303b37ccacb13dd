"""Lockstep: post-train language models by reinforcement learning with verifiable rewards; trainer and engine in lockstep.

Names of the Python interface are imported when they are first used, so that `import lockstep` is fast. Their types are in
`__init__.pyi`; docs/python.md is their guide.
"""

from importlib import import_module

__version__ = "0.3.0"

_HOMES = {
    "recipe": "lockstep.api.train",
    "train": "lockstep.api.train",
    "resume": "lockstep.api.train",
    "evaluate": "lockstep.api.evaluate",
    "compare": "lockstep.api.evaluate",
    "Run": "lockstep.api.run",
    "Recipe": "lockstep.config.schema",
    "LockstepError": "lockstep.errors",
}
"""Module of each name."""

__all__ = ["LockstepError", "Recipe", "Run", "__version__", "compare", "evaluate", "recipe", "resume", "train"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
