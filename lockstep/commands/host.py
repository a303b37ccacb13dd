"""`lockstep host`: runs commands on spare machines over ssh. Sends code, environment and weights, and fetches the results."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import TYPE_CHECKING

from lockstep.commands.eval import positive

if TYPE_CHECKING:
    from lockstep.hosts.connection import Connection

HELP = {
    "list": "the hosts of your configuration, or the jobs of one",
    "sync": "bring Lockstep, the environment, and what the words name (as for eval or train)",
    "verify": "compare packages, data and weights there with those here; exit 10 if they differ",
    "run": "start eval or train there; it lives on without the connection",
    "tail": "show a job's log",
    "fetch": "bring back what a job made; its exit code becomes this command's",
    "stop": "end a job",
    "gc": "show what can be removed there: fetched jobs, files that no job needs",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `host VERB NAME …`."""
    verbs = subparsers.add_parser("host", help="spare machines by ssh: bring, check, start, fetch").add_subparsers(
        dest="verb", metavar="VERB", required=True
    )
    made = {verb: verbs.add_parser(verb, help=text) for verb, text in HELP.items()}
    for verb, parser in made.items():
        parser.add_argument(
            "host", nargs="?" if verb == "list" else None, metavar="NAME", help="host of the configuration"
        )
    for verb in ("sync", "verify"):
        made[verb].add_argument("words", nargs="*", metavar="TARGET|RECIPE|a.b=c", help="runs, models, recipes, files")
    made["sync"].add_argument("--dry-run", action="store_true", help="say what would be sent")
    made["run"].add_argument("--name", type=_job_name, help="name of the job, instead of eval-001 and so on")
    made["run"].add_argument(
        "--env", action="append", default=[], metavar="VAR", help="send its value, such as HF_TOKEN's"
    )
    made["run"].add_argument("--allow-mismatch", action="store_true", help="evaluate although packages differ")
    made["run"].add_argument("command", choices=("eval", "train"), metavar="eval|train", help="the command")
    made["run"].add_argument("words", nargs=argparse.REMAINDER, metavar="…", help="its words")
    for verb in ("tail", "fetch", "stop"):
        made[verb].add_argument("job", type=_job_name, metavar="JOB")
    made["tail"].add_argument("-n", "--lines", type=positive, default=20, help="last lines to show (20)")
    made["tail"].add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    made["stop"].add_argument("--seconds", type=float, default=30.0, help="time to save before it is ended (30)")
    made["gc"].add_argument("--all", action="store_true", help="also what sync brought and no job needs")
    made["gc"].add_argument("--yes", action="store_true", help="remove it")


def run(args: argparse.Namespace) -> int:
    """Do it. Raises ConfigError for the configuration, HostError for the machine."""
    from lockstep.config.hosts import host_of, hosts
    from lockstep.hosts.connection import Connection

    if args.host is None:
        for name, host in hosts().items():
            print(f"{name}: {host.ssh}, {host.folder}, {f'environment of {host.lock}' if host.lock else host.python}")
        return 0
    link = Connection(args.host, host_of(args.host))
    match args.verb:
        case "sync" | "verify":
            return _bring(link, args)
        case "run":
            from lockstep.hosts.jobs import run as start

            job = start(link, [args.command, *args.words], args.name or "", args.env, allow=args.allow_mismatch)
            print(f"{job} is started on {args.host}; it does not need this connection")
            print(f"  lockstep host tail {args.host} {job} -f\n  lockstep host fetch {args.host} {job}")
            return 0
        case "tail":
            return _tail(link, args)
        case "fetch":
            from lockstep.hosts.fetch import fetch

            lines, code = fetch(link, args.job)
            print("\n".join([*lines, f"{args.job} ended with {code}"]))
            return code if 0 <= code < 256 else 128 - code
        case "stop":
            print(f"{args.job} {link.call('stop', job=args.job, seconds=args.seconds)['state']}")
        case "gc":
            out = link.call("gc", yes=args.yes, all=args.all)
            word = "removed" if args.yes else "would remove"
            print("\n".join([*(f"{word} {name}" for name in out["removed"]), f"{out['bytes'] / 1e6:,.1f} MB"]))
        case _:
            _list(link)
    return 0


def _bring(link: Connection, args: argparse.Namespace) -> int:
    from lockstep.errors import HostError
    from lockstep.hosts.inputs import inputs_of
    from lockstep.hosts.jobs import sync, verify

    inputs = inputs_of(["", *args.words], project=link.host.project)
    if args.verb == "sync":
        found = sync(link, inputs, dry_run=args.dry_run)
        word = "would be sent" if args.dry_run else "sent"
        print(f"{found.sent / 1e6:,.2f} MB {word}, {found.there / 1e6:,.2f} MB were there; environment: {found.python}")
        return 0
    facts, differences = verify(link, inputs)
    print("\n".join([*facts, *(one.what for one in differences)]))
    if differences:
        fixes = "; ".join(dict.fromkeys(one.fix for one in differences))
        raise HostError(
            f"this machine and the host differ in {len(differences)} points", where=f"host {args.host}", fix=fixes
        )
    print("nothing differs")
    return 0


def _tail(link: Connection, args: argparse.Namespace) -> int:
    offset, lines = 0, args.lines
    while True:
        said = link.call("log", job=args.job, offset=offset, lines=lines)
        print(said["text"], end="", flush=True)
        offset, lines = said["offset"], None
        if not args.follow or said["state"] != "running":
            print(f"{args.job} {said['state']}")
            return 0
        time.sleep(2)


def _list(link: Connection) -> None:
    from lockstep.text import visible

    for job in link.call("listed")["jobs"]:
        took = f" after {job['seconds']:,.0f} s" if job["seconds"] is not None else ""
        fetched = ", fetched" if job["fetched"] else ""
        print(visible(f"{job['job']}: {job['state']}{took}{fetched}: lockstep {shlex.join(job['argv'])}"))


def _job_name(text: str) -> str:
    from lockstep.config.hosts import NAME

    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError("a job's name has letters, digits, dots and dashes")
    return text
