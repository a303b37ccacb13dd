"""Calls and file transfers with ssh and rsync. An interrupted one can be repeated: a partial file never counts as whole."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.hosts import Host
from lockstep.errors import HostError
from lockstep.hosts import remote

log = logging.getLogger(__name__)

SSH = ("-a", "-x", "-T")  # no agent, no X11, no terminal
OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "3",
}
KEPT = ("HOME", "PATH", "USER", "LOGNAME", "LANG", "SSH_AUTH_SOCK", "TMPDIR")
"""Environment variables that ssh and rsync get: a SendEnv in ssh's configuration can then send no secret."""
ATTEMPTS = 3
CUT = {10, 12, 30, 35, 255}
"""Exit codes of rsync after which going on may help: socket, protocol stream, time-outs, ssh."""
LITERAL = re.compile(r"Literal data: ([\d,]+) bytes")
CAUSES = {
    "Host key verification failed": "compare the fingerprint of the machine's key with the true one (there: ssh-keygen -lf "
    "/etc/ssh/ssh_host_ed25519_key.pub), then connect once by hand: ssh {ssh}",
    "Permission denied": "load your key (ssh-add) or name it in ~/.ssh/config, until `ssh {ssh} true` asks no question",
    "Could not resolve hostname": "correct hosts.{name}.ssh, or add an alias to ~/.ssh/config",
    "No space left": "free space with lockstep host gc {name} --all --yes, or set hosts.{name}.folder to a larger disk",
    "not found": "install the missing program there, or correct hosts.{name}.python",
    "file_digest": "set hosts.{name}.python to Python 3.11 or newer",
}
"""Remedies, by a piece of the message of ssh, rsync or the other machine."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A host and its name."""

    name: str
    host: Host

    def call(self, verb: str, **request: object) -> Any:
        """Let the other machine answer one request. Raises HostError."""
        body = json.dumps(json.dumps(request))
        program = f"{Path(remote.__file__).read_text()}\nmain({verb!r}, {self.host.folder!r}, {body})\n"
        command = [*self._ssh(), "--", self.host.ssh, shlex.join([self.host.python, "-I", "-"])]
        done = _run(command, program.encode())
        _, mark, reply = done.stdout.decode(errors="replace").rpartition(f"\n{remote.REPLY}")
        if not mark:
            raise self.error(verb, done.stderr.decode(errors="replace") or f"exit code {done.returncode}, no reply")
        answer = json.loads(reply)
        if "refused" in answer:
            raise self.error(verb, answer["refused"], fix=f"lockstep host list {self.name} shows its jobs")
        return answer["reply"]

    def push(self, files: Mapping[str, Path]) -> int:
        """Send files into the folder `partial` there, under the names given. Returns the bytes that were sent."""
        with tempfile.TemporaryDirectory() as stage:
            for name, path in files.items():
                (Path(stage) / name).symlink_to(path.absolute())
            return self._transfer(["--copy-links", "--chmod=F600", f"{stage}/", f"{self._place('partial')}/"])

    def pull(self, folder: str, names: Sequence[str], to: Path) -> int:
        """Fetch files of a folder there. Returns the bytes that were received."""
        listed = "\0".join(names).encode()
        return self._transfer(["--from0", "--files-from=-", f"{self._place(folder)}/", f"{to}/"], listed)

    def error(self, doing: str, said: str, fix: str = "") -> HostError:
        """Make an error of what ssh, rsync or the other machine said."""
        known = next((fix for sign, fix in CAUSES.items() if sign in said), "")
        fix = known or fix or "repeat the command: what was sent is kept; `ssh {ssh} true` tests the connection"
        line = " ".join(said.split()[-60:])
        return HostError(
            f"{doing}: {line}", where=f"host {self.name}", fix=fix.format(name=self.name, ssh=self.host.ssh)
        )

    def _transfer(self, words: list[str], listed: bytes = b"") -> int:
        command = ["rsync", "--recursive", "--inplace", "--append-verify", "--partial", "--stats", "--protect-args"]
        command += ["--timeout=60", "--rsh", shlex.join(self._ssh())]
        command += [f"--bwlimit={self.host.limit}"] if self.host.limit else []
        for attempt in range(1, ATTEMPTS + 1):
            done = _run([*command, *words], listed)
            if done.returncode == 0:
                found = LITERAL.search(done.stdout.decode(errors="replace"))
                return int(found[1].replace(",", "")) if found else 0
            said = done.stderr.decode(errors="replace")
            if done.returncode not in CUT or attempt == ATTEMPTS or "verification failed" in said:
                break
            log.warning("host %s: the transfer was cut off (rsync %d); going on", self.name, done.returncode)
            time.sleep(attempt)
        raise self.error("transfer", said or f"rsync ended with {done.returncode}")

    def _ssh(self) -> list[str]:
        settings = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *SSH, *settings, *self.host.options]

    def _place(self, folder: str) -> str:
        return f"{self.host.ssh}:{self.host.folder.removeprefix('~/')}/{folder}"


def _run(command: Sequence[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
    if shutil.which(command[0]) is None:
        package = {"ssh": "openssh-client"}.get(command[0], command[0])
        raise HostError(f"{command[0]} is not installed on this machine", fix=f"apt-get install {package}")
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    return subprocess.run(command, input=given, capture_output=True, check=False, env=environment)
