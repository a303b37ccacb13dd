"""The program that runs on the other machine; it needs only Python. Each call is one verb, with a JSON request and reply.

It is sent to Python over ssh's standard input. Layout of its folder:

    store/SHA256         files that were sent and checked      partial/SHA256  files that are being sent
    code/DIGEST/         a version of Lockstep                 env/DIGEST/     an environment made from a lock file
    jobs/NAME/           job.json, work/ (the command's folder), log.txt, watch.json, exit.json
"""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LINKED = 1 << 20
"""Files of this size and more are hard links to the store: weights are there once."""
DAY = 86400.0
REPLY = "LOCKSTEP-REPLY "


class Refused(Exception):
    """A request that cannot be met; the text is shown to the user."""


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(path: Path, value: object) -> None:
    """Write JSON whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(path: Path) -> Any:
    """Return the JSON in a file; None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


@contextmanager
def locked(root: Path) -> Iterator[None]:
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- what is sent -----------------------------------------------------------------------------------------------------
def missing(root: Path, request: Any) -> Any:
    """Return which files are not in the store, how much of them was sent before, and the free bytes."""
    store, partial = root / "store", root / "partial"
    store.mkdir(parents=True, exist_ok=True)
    partial.mkdir(exist_ok=True)
    absent = [sha for sha in request["files"] if not (store / sha).is_file()]
    begun = {sha: (partial / sha).stat().st_size for sha in absent if (partial / sha).is_file()}
    return {"missing": absent, "begun": begun, "free": shutil.disk_usage(root).free, "folder": str(root.absolute())}


def accept(root: Path, request: Any) -> Any:
    """Move each file whose bytes are right from partial to the store and delete the others; returns those not in the store."""
    for sha in request["files"]:
        path = root / "partial" / sha
        if not path.is_file():
            continue  # another transfer of the same file was faster
        if digest_of(path) != sha:
            path.unlink()
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o444)
        path.replace(root / "store" / sha)
    with locked(root):
        write(root / "names.json", (read(root / "names.json") or {}) | request["names"])
    return {"missing": [sha for sha in request["files"] if not (root / "store" / sha).is_file()]}


def compare(root: Path, request: Any) -> Any:
    """Read every named file in the store again. Returns those that are absent or damaged, and older ones of the same name."""
    state, before = {}, read(root / "names.json") or {}
    for name, sha in request["names"].items():
        path = root / "store" / sha
        if not path.is_file():
            state[name] = f"another one there, {before[name][:12]}" if before.get(name, sha) != sha else "absent there"
        elif digest_of(path) != sha:
            state[name] = "damaged there"
            path.unlink()  # the next sync sends it again
    return {"wrong": state}


def fill(root: Path, folder: Path, files: dict[str, str]) -> None:
    """Make `folder` with these files of the store. Raises Refused for a name that leads out of it, or a file that is absent."""
    for name, sha in files.items():
        place = Path(name)
        if place.is_absolute() or ".." in place.parts:
            raise Refused(f"{name}: not a name within the folder")
        source, path = root / "store" / sha, folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if not source.is_file():
            raise Refused(f"{name} was not sent")
        if source.stat().st_size >= LINKED and path.suffix != ".jsonl":  # those may be appended to
            os.link(source, path)
        else:
            shutil.copyfile(source, path)


def code(root: Path, request: Any) -> Any:
    """Make a version of Lockstep from the store, whole or not at all."""
    place = root / "code" / request["digest"]
    if not place.is_dir():
        fresh = place.with_name(f".{place.name}.{os.getpid()}")
        fill(root, fresh, request["files"])
        try:
            fresh.rename(place)
        except OSError:  # another sync was faster
            shutil.rmtree(fresh)
    return {}


def environment(root: Path, request: Any) -> Any:
    """Build an environment from a lock file, with its log beside it; one without .complete is made again from the beginning."""
    place = root / "env" / request["digest"]
    place.parent.mkdir(exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock, place.with_suffix(".log").open("w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / ".complete").exists():
            return {}
        shutil.rmtree(place, ignore_errors=True)
        pip = [str(place / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", *request["pip"]]
        steps = [[sys.executable, "-m", "venv", str(place)]]
        steps += [[*pip, *request["torch"]]] if request["torch"] else []
        steps += [[*pip, "--require-hashes", "-r", str(root / "store" / request["lock"])]]
        for step in steps:
            if subprocess.run(step, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode:
                said = Path(log.name).read_text(errors="replace").strip().splitlines()
                raise Refused(f"the environment cannot be made: {' '.join(said[-3:])} (all of it: {log.name})")
        (place / ".complete").touch()
    return {}


def facts(root: Path, request: Any) -> Any:
    """Return the packages and the version of the Python that commands use there, and what is known of the machine."""
    program = (
        "import json, sys; from importlib import metadata as m; "
        "print(json.dumps([sys.version.split()[0], {d.name: d.version for d in reversed([*m.distributions()]) if d.name}]))"
    )
    done = subprocess.run([request["python"], "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{request['python']}: {done.stderr.strip().splitlines()[-1:]}")
    version, packages = json.loads(done.stdout)
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines() if smi else []
    shown = {name: os.environ[name] for name in ("HF_HOME", "HF_HUB_OFFLINE", "LOCKSTEP_CACHE") if name in os.environ}
    return {"python": version, "packages": packages, "gpus": gpus, "env": shown, "free": shutil.disk_usage(root).free}


# --- commands ---------------------------------------------------------------------------------------------------------
def start(root: Path, request: Any) -> Any:
    """Start a command that lives on without the connection. The same request made twice starts one."""
    jobs = root / "jobs"
    jobs.mkdir(exist_ok=True)
    with locked(root):
        known = [path.parent for path in jobs.glob("*/job.json") if read(path)["token"] == request["token"]]
        place = known[0] if known else _make(root, jobs, request)
        if read(place / "watch.json") is None:
            program = root.absolute() / "code" / request["code"] / "lockstep/hosts/remote.py"
            watcher = [sys.executable, str(program), "watch", str(place.absolute())]
            with (place / "log.txt").open("ab") as log:
                process = subprocess.Popen(
                    watcher, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            write(place / "watch.json", {"watcher": [process.pid, _born(process.pid)]})
    return {"job": place.name}


def _make(root: Path, jobs: Path, request: Any) -> Path:
    fresh = jobs / f".{request['token']}"
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "work").mkdir(parents=True)
    fill(root, fresh / "work", request["files"])
    write(fresh / "job.json", request)
    for number in range(1, 10**6):
        place = jobs / (request["name"] or f"{request['argv'][0]}-{number:03d}")
        if not place.exists():
            fresh.rename(place)
            return place
        if request["name"]:
            shutil.rmtree(fresh)
            raise Refused(f"a job named {request['name']} already exists: choose another --name")
    raise Refused("there are too many jobs")


def watch(place: Path) -> None:
    """Run a job's command to its end, then write down its exit code and the hash of every file that it made or changed."""
    job, began = read(place / "job.json"), time.time()
    root, work = place.parents[1], place / "work"
    python = root / "env" / job["env"] / "bin/python" if job["env"] else Path(job["python"])
    variables = (
        os.environ | job["variables"] | {"PYTHONPATH": str(root / "code" / job["code"]), "PYTHONUNBUFFERED": "1"}
    )
    command = [str(python), "-P", "-m", "lockstep", *job["argv"]]
    try:
        child = subprocess.Popen(command, cwd=work, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        write(place / "exit.json", {"code": 127, "why": str(error), "seconds": 0, "files": {}})
        return
    write(place / "child.json", [child.pid, _born(child.pid)])
    ended = child.wait()
    sent = {name: sha for name, sha in job["files"].items() if (work / name).is_file()}
    same = {name for name, sha in sent.items() if _same(work / name, root / "store" / sha)}
    made = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        if path.is_file() and not path.is_symlink() and name not in same and "__pycache__" not in path.parts:
            made[name] = {"sha256": digest_of(path), "bytes": path.stat().st_size}
    write(place / "exit.json", {"code": ended, "seconds": time.time() - began, "files": made})


def _same(path: Path, stored: Path) -> bool:
    return path.samefile(stored) or digest_of(path) == stored.name


def _born(pid: int) -> str:
    """Return the time at which a process began, so that another one of its number is not taken for it; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _state(place: Path) -> str:
    if (done := read(place / "exit.json")) is not None:
        return f"ended with {done['code']}"
    if (watching := read(place / "watch.json")) is None:
        return "not started"
    pid, born = watching["watcher"]
    return "running" if born and _born(pid) == born else "lost: the machine or the process was ended"


def listed(root: Path, request: Any) -> Any:
    """Return every job with its state."""
    found = []
    for path in sorted((root / "jobs").glob("*/job.json"), key=lambda path: path.stat().st_mtime):
        done = read(path.with_name("exit.json")) or {}
        one = {"job": path.parent.name, "state": _state(path.parent), "argv": read(path)["argv"]}
        found.append(one | {"seconds": done.get("seconds"), "fetched": path.with_name("fetched").exists()})
    return {"jobs": found}


def _job(root: Path, request: Any) -> Path:
    place: Path = root / "jobs" / request["job"]
    if not (place / "job.json").is_file():
        known = ", ".join(sorted(path.parent.name for path in (root / "jobs").glob("*/job.json")))
        raise Refused(f"there is no job {request['job']}; there are: {known or 'none'}")
    return place


def log(root: Path, request: Any) -> Any:
    """Return the log from a byte on, or its last lines, and the state."""
    place = _job(root, request)
    state = _state(place)  # before reading: what is written at the end is then not missed
    with (place / "log.txt").open("rb") as file:
        file.seek(request["offset"])
        raw = file.read()
    reader = codecs.getincrementaldecoder("utf-8")("replace")
    text = reader.decode(raw, final=state != "running")  # of a character that is half written the next call gets all
    if request["lines"] is not None:
        text = "".join(text.splitlines(keepends=True)[-request["lines"] :] if request["lines"] else [])
    return {"text": text, "offset": request["offset"] + len(raw) - len(reader.getstate()[0]), "state": state}


def stop(root: Path, request: Any) -> Any:
    """Ask a job's processes to end (SIGTERM), then end them."""
    place = _job(root, request)
    for number, wait in ((signal.SIGTERM, request["seconds"]), (signal.SIGKILL, 10.0)):
        child = read(place / "child.json")
        if _state(place) == "running" and child and child[1] and _born(child[0]) == child[1]:
            os.killpg(child[0], number)
        until = time.monotonic() + wait
        while _state(place) == "running" and time.monotonic() < until:
            time.sleep(0.1)
    return {"state": _state(place)}


def results(root: Path, request: Any) -> Any:
    """Return a job, its exit code and the files that it made. `fetched`: note that they are on the other machine."""
    place = _job(root, request)
    if request["fetched"]:
        (place / "fetched").touch()
    return {"job": read(place / "job.json"), "exit": read(place / "exit.json"), "state": _state(place)}


def gc(root: Path, request: Any) -> Any:
    """Remove jobs whose results were fetched, files that no job and no name needs, and transfers that were not continued."""
    with locked(root):
        jobs = list((root / "jobs").glob("*/job.json"))
        old = [path.parent for path in jobs if path.with_name("fetched").exists() and _state(path.parent) != "running"]
        kept = [read(path) for path in jobs if path.parent not in old]
        names = {} if request["all"] else read(root / "names.json") or {}
        needed = {sha for job in kept for sha in (*job["files"].values(), job["lock"])} | set(names.values())
        stale = [path for path in (root / "partial").glob("*") if time.time() - path.stat().st_mtime > DAY]
        out = [*old, *stale, *(path for path in (root / "store").glob("*") if path.name not in needed)]
        if request["all"]:
            used = {job["code"] for job in kept} | {job["env"] for job in kept}
            out += [path for part in ("code", "env") for path in (root / part).glob("*") if path.stem not in used]
        files = [file.lstat() for path in out for file in [path, *path.rglob("*")] if file.is_file()]
        links = Counter(one.st_ino for one in files)  # a file is gone when its last hard link is
        total = sum({one.st_ino: one.st_size for one in files if links[one.st_ino] == one.st_nlink}.values())
        for path in out if request["yes"] else []:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if request["all"] and request["yes"]:
            write(root / "names.json", {})
    return {"removed": [str(path.relative_to(root)) for path in out], "bytes": total}


VERBS = {
    verb.__name__: verb
    for verb in (missing, accept, compare, code, environment, facts, start, listed, log, stop, results, gc)
}


def main(verb: str, folder: str, request: str) -> None:
    """Answer one request on standard output, after a mark: a login shell may have printed something before."""
    try:
        os.umask(0o077)  # jobs may have secrets among their variables
        root = Path.home() / folder.removeprefix("~/")
        root.mkdir(parents=True, exist_ok=True)
        reply = {"reply": VERBS[verb](root, json.loads(request))}
    except Refused as error:
        reply = {"refused": str(error)}
    except OSError as error:
        reply = {"refused": f"{error.filename or folder}: {error.strerror}"}
    print(f"\n{REPLY}{json.dumps(reply)}", flush=True)


if __name__ == "__main__" and sys.argv[1:2] == ["watch"]:
    watch(Path(sys.argv[2]))
