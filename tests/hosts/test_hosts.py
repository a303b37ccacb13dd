"""`lockstep host` against a real sshd: what is sent, what is there, what comes back, and what happens when the line breaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint.store import list_checkpoints
from lockstep.cli import main
from lockstep.config.hosts import host_of
from lockstep.errors import HostError
from lockstep.evaluation.records import read_score
from lockstep.hosts import connection, jobs, remote
from lockstep.hosts.connection import Connection
from lockstep.hosts.inputs import inputs_of
from lockstep.track.rundir import RunDirectory
from tests.gallery import Gallery
from tests.hosts.sshd import Machine, machine, trust
from tests.loops.runs import words
from tests.saying import Printed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("sshd")) as found:
        yield found


@pytest.fixture
def spare(there: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine with an empty folder and the default settings; the current folder is a project of its own."""
    shutil.rmtree(there.folder, ignore_errors=True)
    trust(there.home, there.port, "host_key")
    there.configure()
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(there.home / "hosts.yaml"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return there


def link() -> Connection:
    return Connection("spare", host_of("spare"))


def small_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send no recipes: fewer files."""
    monkeypatch.setattr(jobs, "BUILT_IN", Path("nowhere"))


def waited(job: str, seconds: float = 300) -> str:
    until = time.monotonic() + seconds
    while (state := link().call("log", job=job, offset=0, lines=0)["state"]) == "running" and time.monotonic() < until:
        time.sleep(0.3)
    return str(state)


# --- a command there is a command here -------------------------------------------------------------------------------
def test_an_evaluation_sent_there_is_the_one_made_here(
    spare: Machine,
    gallery: Gallery,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gallery.copy("lora", tmp_path / "project/runs/mine")
    gallery.copy("lora", tmp_path / "local/runs/mine")
    asked = ["eval", "runs/mine", "--items", "4", "--mode", "sampled", "--no-base"]
    assert main(["host", "run", "spare", *asked]) == 0
    assert "eval-001 is started on spare" in capsys.readouterr().out
    spare.cut()  # a job needs no connection
    monkeypatch.chdir(tmp_path / "local")
    assert main(asked) == 0
    monkeypatch.chdir(tmp_path / "project")
    assert waited("eval-001") == "ended with 0", link().call("log", job="eval-001", offset=0, lines=50)["text"]

    # a file that is not what the job wrote is refused, and nothing of it is stored
    before = sorted(Path("runs").rglob("*"))
    (made,) = (spare.folder / "jobs/eval-001/work/runs/mine/scores").glob("*/*.json")
    whole = made.read_bytes()
    made.write_bytes(whole.replace(b'"accuracy"', b'"accuraty"', 1))
    assert main(["host", "fetch", "spare", "eval-001"]) == 10
    assert "fetched files differ from those that the job wrote, and were deleted" in capsys.readouterr().err
    assert sorted(Path("runs").rglob("*")) == before
    made.write_bytes(whole)

    assert main(["host", "fetch", "spare", "eval-001"]) == 0
    capsys.readouterr()
    (mine,), (local,) = Path("runs").glob("*/scores/*/*.json"), (tmp_path / "local").glob("runs/*/scores/*/*.json")
    assert mine == local.relative_to(tmp_path / "local")
    one, other = read_score(mine), read_score(local)
    assert one.results == other.results
    assert one.conditions == other.conditions
    assert one.proof is not None
    assert (one.source, other.source) == ("runs/mine at step 3, on spare", "runs/mine at step 3")
    record = json.loads(Path(".lockstep/hosts/spare/eval-001.json").read_text())
    assert record["files"].keys() >= {"runs/mine/recipe.yaml", "runs/mine/checkpoints/step_000003/COMMIT.json"}
    assert main(["host", "fetch", "spare", "eval-001"]) == 0
    assert "all 4 replies are those of the stored score" in capsys.readouterr().out


def test_runs_below_the_home_folder_come_back_there() -> None:
    assert list(inputs_of(["train", "runs_dir=~/runs"]).paths.values()) == [str(Path.home() / "runs")]


@pytest.mark.slow
def test_training_goes_on_without_the_connection_and_its_run_is_fetched(
    spare: Machine, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], gallery: Gallery
) -> None:
    recipe = words(tmp_path / "elsewhere", tiny_model_dir, "eval.enabled=false", "steps=2", "name=sent")
    assert main(["host", "run", "spare", "--name", "a.job", "train", *recipe]) == 0
    following = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "host", "tail", "spare", "a.job", "-f"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(1)
    spare.cut()
    following.kill()
    following.wait()
    assert waited("a.job") == "ended with 0", link().call("log", job="a.job", offset=0, lines=50)["text"]
    assert main(["host", "fetch", "spare", "a.job"]) == 0
    place = tmp_path / "elsewhere/runs/sent"  # the recipe's own runs_dir
    run = RunDirectory.open(place)
    fetched = run.manifest()["fetched_from"]
    assert (fetched["host"], fetched["job"]) == ("spare", "a.job")
    assert str(tiny_model_dir) in run.recipe_yaml()
    assert "inputs/" not in run.recipe_yaml()
    assert {json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()} == {1, 2}
    capsys.readouterr()
    assert main(["host", "fetch", "spare", "a.job"]) == 10  # a run that is there is not written over
    assert "another file or run of this name is already here" in capsys.readouterr().err
    assert main(["host", "list", "spare"]) == 0
    assert "a.job: ended with 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_is_stopped_saves_and_goes_on_here(
    spare: Machine, tmp_path: Path, tiny_model_dir: Path, printed: Printed
) -> None:
    recipe = words(
        tmp_path / "elsewhere", tiny_model_dir, "eval.enabled=false", "steps=150", "save.every=150", "name=long"
    )
    assert main(["host", "run", "spare", "--name", "long", "train", *recipe]) == 0
    until = time.monotonic() + 90
    log = spare.folder / "jobs/long/log.txt"
    while not log.exists() or log.read_text().count("  reward ") < 2:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    assert "long ended with 75" in printed("host", "stop", "spare", "long")  # interrupted, and saved
    assert main(["host", "fetch", "spare", "long"]) == 75
    place = tmp_path / "elsewhere/runs/long"
    (saved,) = list_checkpoints(place)
    assert (saved.complete, 2 <= saved.step < 150) == (True, True)
    assert f"resumed from step {saved.step}: every file verified" in printed("train", "--resume", place)
    steps = [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 151))
    assert [info.step for info in list_checkpoints(place) if info.complete] == [saved.step, 150]


def test_words_reach_the_command_as_they_are(spare: Machine, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    small_code(monkeypatch)
    odd = ['name=it\'s $(touch pwned) "x"\n`touch pwned`; touch pwned', "--recipe", "* ? ~ & |"]
    assert main(["host", "run", "spare", "eval", *odd]) == 0
    assert waited("eval-001") == "ended with 2"
    assert json.loads((spare.folder / "jobs/eval-001/job.json").read_text())["argv"] == ["eval", *odd]
    assert not list(spare.home.rglob("pwned"))
    assert not (Path.home() / "pwned").exists()
    assert main(["host", "fetch", "spare", "eval-001"]) == 2  # the command's own exit code
    assert main(["host", "run", "spare", "--name", "../../x", "eval", "y"]) == 2


@pytest.mark.slow
def test_the_same_request_twice_starts_one_job(spare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    small_code(monkeypatch)
    sent = jobs.sync(link(), inputs_of(["eval"]))
    request = {
        "token": "t" * 32, "name": "", "argv": ["eval"], "files": {}, "code": sent.code, "env": None, "lock": "",
        "python": sys.executable, "variables": {},
    }  # fmt: skip
    assert [link().call("start", **request)["job"] for _ in range(2)] == ["eval-001", "eval-001"]
    assert waited("eval-001").startswith("ended with")
    assert [one["job"] for one in link().call("listed")["jobs"]] == ["eval-001"]


# --- parity -----------------------------------------------------------------------------------------------------------
def test_what_differs_is_named_with_its_fix(
    spare: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_code(monkeypatch)
    Path("rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    Path("weights").mkdir()
    Path("weights/model.safetensors").write_bytes(os.urandom(2 << 20))
    named = ["rows.jsonl", "weights"]
    assert main(["host", "verify", "spare", *named]) == 10
    assert "rows.jsonl: absent there" in capsys.readouterr().out
    assert main(["host", "sync", "spare", *named]) == 0
    assert main(["host", "verify", "spare", *named]) == 0
    capsys.readouterr()
    Path("rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "3"}\n')
    sha = jobs.Hashes().of(Path("weights/model.safetensors"))
    stored = spare.folder / "store" / sha
    stored.chmod(0o600)
    stored.write_bytes(b"x" + stored.read_bytes()[1:])
    fake = tmp_path / "packages/transformers-1.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1.0\n")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexport PYTHONPATH={fake.parent}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    spare.configure(python=str(wrapper))
    assert main(["host", "verify", "spare", *named]) == 10
    said = capsys.readouterr()
    assert "rows.jsonl: another one there" in said.out
    assert "weights/model.safetensors: damaged there" in said.out
    assert "transformers: 1.0 there, " in said.out
    assert "lockstep host sync spare, with the same words" in said.err
    assert main(["host", "run", "spare", "eval", "rows.jsonl"]) == 10
    assert "packages there and here differ, so replies may differ: transformers: 1.0 there" in capsys.readouterr().err
    spare.configure()
    assert main(["host", "sync", "spare", *named]) == 0  # the fix
    assert main(["host", "verify", "spare", *named]) == 0


# --- a bad line -------------------------------------------------------------------------------------------------------
def test_a_transfer_that_breaks_goes_on_where_it_was(
    spare: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_code(monkeypatch)
    jobs.sync(link(), inputs_of(["eval"]))
    spare.configure(limit=1500)
    size = 4 << 20
    Path("weights").write_bytes(os.urandom(size))
    sha = jobs.Hashes().of(Path("weights"))
    partial, stored = spare.folder / "partial" / sha, spare.folder / "store" / sha

    client = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "host", "sync", "spare", "weights"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    begun(partial)
    os.killpg(client.pid, signal.SIGKILL)  # this machine dies
    client.wait()
    time.sleep(0.5)
    first = partial.stat().st_size
    assert 0 < first < size
    assert not stored.exists()  # no half state

    breaker = threading.Thread(target=lambda: (begun(partial, first + (256 << 10)), spare.cut()))  # the line dies
    breaker.start()
    sent = jobs.sync(link(), inputs_of(["", "weights"]))
    breaker.join()
    assert jobs.Hashes().of(stored) == sha
    assert sent.sent <= size - first + (64 << 10)  # the piece that was on its way
    assert jobs.sync(link(), inputs_of(["", "weights"])).sent == 0
    Path("the same weights").write_bytes(Path("weights").read_bytes())
    assert jobs.sync(link(), inputs_of(["", "the same weights"])).sent == 0


def begun(path: Path, at_least: int = 1 << 19) -> None:
    until = time.monotonic() + 60
    while (not path.exists() or path.stat().st_size < at_least) and time.monotonic() < until:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_damaged_piece_is_sent_again(spare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    small_code(monkeypatch)
    Path("weights").write_bytes(os.urandom(1 << 20))
    link().call("missing", files=[])
    (spare.folder / "partial" / jobs.Hashes().of(Path("weights"))).write_bytes(b"\0" * (1 << 20))  # whole by its size
    jobs.sync(link(), inputs_of(["", "weights"]))
    assert link().call("compare", names={"weights": jobs.Hashes().of(Path("weights"))})["wrong"] == {}


def test_another_host_key_is_refused(spare: Machine, printed: Printed) -> None:
    trust(spare.home, spare.port, "other_key")
    said = printed("host", "list", "spare", code=10)
    assert "Host key verification failed" in said
    assert "compare the fingerprint" in said
    assert not spare.folder.exists()


def test_a_full_disk_there_is_named(spare: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, check=False
    ).returncode:
        pytest.skip("a small disk cannot be mounted here (needs root)")
    try:
        spare.configure(folder=str(small / "folder"))
        Path("weights").write_bytes(os.urandom(3 << 20))
        with pytest.raises(
            HostError, match=r"No space left: .* MB are to be sent, .* MB are free in .*\n.*host gc spare"
        ):
            jobs.sync(link(), inputs_of(["", "weights"]))
        monkeypatch.setattr(jobs, "SPARE", -(1 << 40))  # the disk fills up amid it
        with pytest.raises(HostError, match=r"(?s)No space left.*host gc spare"):
            jobs.sync(link(), inputs_of(["", "weights"]))
        assert list((small / "folder/store").iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_nothing_of_this_environment_travels(spare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hf_do_not_send")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(spare.home / "agent"))
    one = link()
    done = connection._run([*one._ssh(), "--", "spare", "env"], b"")
    seen = done.stdout.decode()
    assert "USER=" in seen
    assert (
        "hf_do_not_send" not in seen
    )  # although ssh's configuration has SendEnv SECRET_*, and the machine accepts all
    assert "SSH_AUTH_SOCK" not in seen  # although it has ForwardAgent yes
    Path(".env").write_text("HF_TOKEN=x")
    with pytest.raises(HostError, match="its name says that it holds secrets"):
        inputs_of(["", ".env"])


@pytest.mark.slow
def test_an_environment_is_made_there_from_a_lock_file(spare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    small_code(monkeypatch)
    wheels = spare.home / "wheels"
    wheels.mkdir(exist_ok=True)
    wheel = wheels / "tiny_thing-1.0-py3-none-any.whl"
    import zipfile

    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny_thing.py", "")
        info = "tiny_thing-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    lock = Path("small.lock")
    spare.configure(lock=str(lock), pip=["--no-index", "--find-links", str(wheels)])
    lock.write_text(f"tiny-thing==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(HostError, match="the environment cannot be made"):
        jobs.sync(link(), inputs_of(["eval"]))
    lock.write_text(f"tiny-thing==1.0 --hash=sha256:{jobs.Hashes().of(wheel)}\n")
    sent = jobs.sync(link(), inputs_of(["eval"]))
    assert link().call("facts", python=sent.python)["packages"]["tiny-thing"] == "1.0"
    differ = [one.what for one in jobs.verify(link(), inputs_of(["eval"]))[1]]
    assert any(line.startswith("torch: not installed there") for line in differ)


@pytest.mark.slow
def test_what_no_job_needs_is_removed_on_request(spare: Machine, printed: Printed, monkeypatch) -> None:
    small_code(monkeypatch)
    Path("rows.jsonl").write_text("{}\n")
    assert main(["host", "sync", "spare", "rows.jsonl"]) == 0
    sha = jobs.Hashes().of(Path("rows.jsonl"))
    assert main(["host", "gc", "spare", "--yes"]) == 0
    assert (spare.folder / "store" / sha).exists()  # sync brought it on purpose
    assert f"would remove store/{sha}" in printed("host", "gc", "spare", "--all")
    assert main(["host", "gc", "spare", "--all", "--yes"]) == 0
    assert not (spare.folder / "store" / sha).exists()


def test_a_character_that_is_half_written_is_read_whole(tmp_path: Path) -> None:
    place = tmp_path / "jobs" / "one"
    place.mkdir(parents=True)
    (place / "job.json").write_text("{}")
    remote.write(place / "watch.json", {"watcher": [os.getpid(), remote._born(os.getpid())]})
    (place / "log.txt").write_bytes("a é".encode()[:-1])
    first = remote.log(tmp_path, {"job": "one", "offset": 0, "lines": None})
    (place / "log.txt").write_bytes("a é".encode())
    rest = remote.log(tmp_path, {"job": "one", "offset": first["offset"], "lines": None})
    assert (first["text"], rest["text"], first["state"]) == ("a ", "é", "running")


def test_a_hard_link_takes_no_room_of_its_own(tmp_path: Path) -> None:
    for folder in ("store", "jobs/old/work", "jobs/new/work"):
        (tmp_path / folder).mkdir(parents=True)
    for name, file in (("old", "b"), ("new", "a")):
        job = {"files": {"w": "a"} if name == "new" else {}, "lock": None, "code": "", "env": ""}
        remote.write(tmp_path / "jobs" / name / "job.json", job)
        (tmp_path / "store" / file).write_bytes(b"0" * 1000)
        (tmp_path / "jobs" / name / "work" / "w").hardlink_to(tmp_path / "store" / file)
    (tmp_path / "jobs/old/work/also").hardlink_to(tmp_path / "store/a")  # which the new job needs
    for name in ("job.json", "fetched"):
        (tmp_path / "jobs/old" / name).touch()
    own = (tmp_path / "jobs/old/job.json").stat().st_size
    assert remote.gc(tmp_path, {"yes": False, "all": False})["bytes"] == 1000 + own


# --- the configuration ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "why"),
    [
        ({"ssh": "-oProxyCommand=touch pwned"}, "write an alias, machine or user@machine"),
        ({"ssh": "a b"}, "write an alias"),
        ({"folder": "it's"}, "must not be empty, nor have quotes"),
        ({"pasword": "x"}, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_configuration_is_refused(
    host: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    (tmp_path / "hosts.yaml").write_text(json.dumps({"hosts": {"spare": host}}))
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(tmp_path / "hosts.yaml"))
    assert why in printed("host", "list", code=2)
    (tmp_path / "hosts.yaml").write_text("hosts:\n  spare: {ssh: user@one}\n  spare: {ssh: user@two}\n")
    assert "hosts.yaml:3: hosts.spare: written twice" in printed("host", "list", code=2)
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(tmp_path / "none.yaml"))
    assert "there is no such file" in printed("host", "list", code=2)
