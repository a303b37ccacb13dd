"""A real sshd on the loopback, with keys, configuration and port of its own below a folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if Path(path).exists()), None)


@dataclass
class Machine:
    """What is reached as the host `spare`: this machine, through ssh."""

    home: Path
    folder: Path
    port: int
    daemon: subprocess.Popen[bytes]

    def configure(self, **settings: object) -> None:
        host = {"ssh": "spare", "folder": str(self.folder), "python": sys.executable}
        host |= {"options": ["-F", str(self.home / "ssh_config")], **settings}
        (self.home / "hosts.yaml").write_text(yaml.safe_dump({"hosts": {"spare": host}}))

    def cut(self) -> int:
        """End every connection there is, as a lost network does; returns how many processes that ended."""
        mine = [
            one for one in psutil.Process(self.daemon.pid).children(recursive=True) if one.name().startswith("sshd")
        ]
        for one in mine:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        return len(mine)


@contextmanager
def machine(home: Path) -> Iterator[Machine]:
    """Start sshd as the current user; skips where there is no sshd, ssh or rsync."""
    for program in ("ssh", "ssh-keygen", "rsync"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if SSHD is None:
        pytest.skip("sshd is not installed (openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # a root's sshd does not start without it
    home.mkdir(parents=True, exist_ok=True)
    for key in ("host_key", "other_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / key)], check=True)
    shutil.copyfile(home / "user_key.pub", home / "authorized")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {home}/host_key\nAuthorizedKeysFile {home}/authorized\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nAcceptEnv *\nMaxStartups 100\n"
    )
    trust(home, port, "host_key")
    (home / "ssh_config").write_text(
        f"Host spare\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {home}/user_key\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {home}/known\n  ForwardAgent yes\n  SendEnv SECRET_*\n"
    )
    log = (home / "sshd.log").open("wb")
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "sshd_config")], stdout=log, stderr=log)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            pytest.skip(f"sshd does not start: {(home / 'sshd.log').read_text()[-300:]}")
        made = Machine(home, home / "the folder there", port, daemon)
        made.configure()
        yield made
    finally:
        daemon.terminate()
        daemon.wait(10)
        log.close()


def trust(home: Path, port: int, key: str) -> None:
    """Make this key the one that is known of the machine."""
    public = (home / f"{key}.pub").read_text().split()
    (home / "known").write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
