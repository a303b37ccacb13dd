"""`lockstep serve`: serves a run, a checkpoint or a model over HTTP, to OpenAI and Anthropic clients on this machine."""

from __future__ import annotations

import argparse
import re
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.commands.eval import add_target_arguments, one_target, positive
from lockstep.commands.view import port
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.scoring.targets import Target


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `serve TARGET`."""
    parser = subparsers.add_parser(
        "serve", help="answer OpenAI and Anthropic clients on this machine with a model's replies"
    )
    add_target_arguments(parser)
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port on 127.0.0.1; by default a free one")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token of clients; written if it does not exist"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the model for clients (default: from the target)")
    parser.add_argument(
        "--framed", action="store_true", help="put the recipe's system text, examples and suffix around each chat"
    )
    parser.add_argument(
        "--waiting",
        type=positive,
        default=1024,
        metavar="N",
        help="requests that may wait; more get 429 (default 1024)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises LockstepError as `lockstep eval` does, MachineError if the port is taken."""
    from lockstep.models.decoder import Decoder
    from lockstep.run.evaluation import computing
    from lockstep.run.signals import StopRequest
    from lockstep.scoring.score import placed, saved_of
    from lockstep.scoring.targets import build_eval_session
    from lockstep.serve.endpoint import Endpoint
    from lockstep.serve.thread import EngineThread

    target, token = _target(args), _token(args.token_file)
    recipe = target.recipe
    session = build_eval_session(recipe)
    proof = placed(target, session, saved_of(target, session))
    numerics = recipe.numerics.label("eval", session.policy.numerics)
    chat = session.policy.chat if args.framed else session.policy.chat.unframed()
    name = args.name or re.sub(r"[^A-Za-z0-9._/-]+", "-", target.label).strip("/")
    slots = 64 if recipe.rollout.slots == "auto" else recipe.rollout.slots
    context = session.policy.context or 0
    vocabulary = Decoder.of(session.policy.model).head.weight_VH.shape[0]
    with (
        StopRequest(lambda text: None) as stop,
        computing(session.engine, numerics),
        EngineThread(session.engine, seed=(recipe.seed, "serve"), running=slots, waiting=args.waiting) as sampler,
        Endpoint(sampler, chat, model=name, context=context, vocabulary=vocabulary, port=args.port) as endpoint,
    ):
        endpoint.admit(token, "serve")
        print("\n".join(f"warning: {note}" for note in target.notes) + "\n" * bool(target.notes), end="")
        print(
            f"{target.label}: weights {proof.fingerprint} in {numerics}, context {context or 'unlimited'}\n"
            f"address {endpoint.address}/v1 (Anthropic clients: {endpoint.address})\n"
            f"token   {f'in {args.token_file}' if args.token_file else token}\n"
            f"model   {name}\n"
            "on this machine only; Ctrl-C ends it",
            flush=True,
        )
        while not stop:
            time.sleep(0.1)
    return 0


def _target(args: argparse.Namespace) -> Target:
    """Return the one target. A model or adapter needs no recipe here: nothing is asked of a task."""
    from lockstep.scoring.targets import find_target

    name, overrides = one_target(args, "served")
    try:
        return find_target(name, args.recipe, overrides, args.step)
    except ConfigError:
        if args.recipe:
            raise
    return find_target(name, [f"model.path={name}", "task=reasoning_gym"], overrides, args.step)


def _token(path: Path | None) -> str:
    """Return the token in a file, or a new one, which is written there for its owner alone."""
    if path is not None and path.exists():
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError([f"{path}: it cannot be read: {error}"], fix="give a file with a token") from error
        if len(token) < 16 or not token.isascii() or not token.isprintable():
            raise ConfigError(
                [f"{path}: a token must have at least 16 ASCII characters"],
                fix="remove the file: a new token is then written",
            )
        return token
    token = secrets.token_urlsafe(24)
    if path is not None:
        try:
            path.touch(mode=0o600)
            path.write_text(token + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                [f"{path}: the token cannot be written: {error.strerror}"], fix="give another file"
            ) from error
    return token
