"""The process that environments are forked from: python -m lockstep.envs.zygote FD SETTINGS

It imports the environments' code, once and without torch. For each descriptor that arrives it forks a child, which serves one
episode on it: a child that hangs, dies or grows is ended alone, and its random numbers are its own.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lockstep.config import schema
from lockstep.envs import wire
from lockstep.envs.make import env_maker
from lockstep.errors import LockstepError
from lockstep.types import Env, Prompt
from lockstep.user_code import describe

_PR_SET_PDEATHSIG = 1
Make = Callable[[Prompt], Env]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings: schema.Task = TypeAdapter(schema.Task).validate_json(sys.argv[2])
    with Path(os.devnull).open("r+") as nowhere:  # output of user code does not belong on the run's console
        for stream in (0, 1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        make = env_maker(settings)
    except LockstepError as error:
        control.sendall(wire.packed({"what": error.what, "where": error.where, "fix": error.fix}))
        return
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # an interrupt is handled by the run, which ends this process when it is done
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    control.sendall(wire.packed({}))
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except InterruptedError:
            continue
        if not data:
            return
        if os.fork() == 0:
            control.close()
            _child(socket.socket(fileno=descriptors[0]), make, settings)
        os.close(descriptors[0])


def _child(channel: socket.socket, make: Make, settings: schema.Task) -> None:
    """Serve one episode, then end without running anything of the parent's."""
    try:
        os.setpgid(0, 0)  # processes that the environment starts are ended with it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        limits = getattr(settings, "turns", None)
        if isinstance(limits, schema.Turns):
            size = int(limits.memory_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        channel.sendall(wire.packed({"pid": os.getpid()}))
        _serve(channel, make)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the driver has closed the episode
    finally:
        os._exit(0)


def _serve(channel: socket.socket, make: Make) -> None:
    buffer, env = bytearray(), None
    while True:
        message = wire.unpack(buffer)
        if message is None:
            data = channel.recv(1 << 16)
            if not data:
                return
            buffer += data
            continue
        env, answer = _answered(env, message, make)
        channel.sendall(wire.packed(answer))


def _answered(env: Env | None, message: dict[str, Any], make: Make) -> tuple[Env | None, dict[str, Any]]:
    """Return an environment's answer to one message. Its own mistakes become errors, which leave the sample unscored."""
    try:
        if message["op"] == "start":
            _seed_globals(message["seed"])
            env = make(wire.prompt_from(message["prompt"]))
            turn = env.start(message["seed"])
        else:
            assert env is not None
            turn = env.step(message["reply"])
        fault = wire.fault_of(turn)
        return env, {"error": fault} if fault else {"turn": wire.turn_to(turn)}
    except (Exception, SystemExit) as error:
        return env, {"error": describe(error, None)}


def _seed_globals(seed: int) -> None:
    """Seed the global random numbers of Python and NumPy, for environments that draw from them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


if __name__ == "__main__":
    main()
