"""Settings of the task `openenv`, whose environments run on an OpenEnv server."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Command, Json, Section
from lockstep.config.tools import Turns


class OpenEnvTask(Section):
    """An environment of OpenEnv, behind its server. Needs pip install 'lockstep-rl[openenv]'."""

    kind: Literal["openenv"] = "openenv"
    url: str | None = Field(default=None, pattern=r"^https?://[^@\s]+$")
    """Address of a server that runs already. Example: http://127.0.0.1:8000"""
    command: Command | None = None
    """Or the command of a server that the run starts and ends; {port} stands for a free port of this machine, which is in $PORT
    too. From this process it gets PATH, HOME and the language alone. Example: hub/bin/python server.py --port {port};
    `python` alone is the one that runs Lockstep."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the command."""
    start_seconds: float = Field(default=60.0, gt=0)
    """Time for the server to answer, before the run."""
    sessions: int = Field(default=1, ge=1, le=256)
    """Episodes that are played at a time, each in a session of the server; further ones wait. A server that was not told another
    number (max_concurrent_envs) allows one."""
    instructions: str = ""
    """Text before the first observation: the rules, and how to answer."""
    action: str | None = Field(default=None, min_length=1)
    """Text field of the action that a reply is put into; none is the only one that the server requires. json: the reply is the
    whole action, a JSON object."""
    observation: str | None = Field(default=None, min_length=1)
    """Field of the observation that is shown. none shows all fields but metadata, as JSON, or the text if there is only one."""
    reset: dict[str, Json] = Field(default_factory=dict)
    """Passed to reset beside the seed."""
    solved: float = 1.0
    """Total reward from which an episode counts as correct."""
    seeds: int = Field(default=200, ge=1)
    """Different episodes to train on: each is one seed given to reset."""
    turns: Turns = Turns(limit=20)

    @model_validator(mode="after")
    def _server(self) -> Self:
        if (self.url is None) is (self.command is None):
            raise ValueError("set one of url and command: the server that has the environment")
        if self.command is None and self.env:
            raise ValueError("env applies to command only: the server at url has its own environment variables")
        if "seed" in self.reset:
            raise ValueError("reset gets the seed of each episode: leave it out")
        return self
