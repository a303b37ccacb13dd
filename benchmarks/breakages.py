"""Environments that are broken on purpose: does `lockstep doctor` name what is wrong, and does its fix work when pasted?

    python -m benchmarks.breakages                 all of them, into the table of docs/install.md
    python -m benchmarks.breakages encoding proxy  these alone, by their name or their check

Each case runs in a throw-away environment that takes the packages of this one; what is broken or fixed is in its own folder. The
shell of a case first does what breaks it, runs doctor, then the text after "to fix:" as it stands, then doctor again.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/breakages.jsonl"
PAGE = ROOT / "docs/install.md"
MARKS = ("<!-- breakages -->\n", "<!-- end of breakages -->")
SITE = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class Case:
    name: str
    check: str
    """Check that must name it."""
    says: str
    """Piece of what it must say."""
    shell: str = ":"
    """What breaks the shell."""
    plant: Callable[[Path, Path], None] | None = None
    """What breaks the environment; it is given its site-packages and the current folder."""
    words: str = ""
    """Recipe for doctor."""
    root: bool = False
    """It needs root, and a mount or network of its own."""
    network: bool = False
    """Its fix installs from a package index."""


@dataclass(frozen=True)
class Result:
    name: str
    named: bool
    found: str
    fix: str
    mended: bool


def copy_of(package: str, site: Path, *parts: str) -> Path:
    """A package's own files as hard links, to be broken without harm to the real ones."""
    for part in parts or (package,):
        source = SITE / part
        shutil.copytree(source, site / part, copy_function=os.link) if source.is_dir() else os.link(source, site / part)
    info = next(SITE.glob(f"{package}-*.dist-info"))
    shutil.copytree(info, site / info.name, copy_function=os.link)
    return site / (parts or (package,))[0]


def replaced(path: Path, content: bytes) -> None:
    """Write another file of that name; the hard-linked original stays."""
    path.unlink()
    path.write_bytes(content)


def no_library(site: Path, _: Path) -> None:
    """tokenizers whose compiled part is cut off, as an interrupted install leaves it."""
    folder = copy_of("tokenizers", site)
    library = next(folder.glob("*.so"))
    replaced(library, library.read_bytes()[:4096])


def wrong_torch(site: Path, _: Path) -> None:
    """A torch of another CUDA, whose libraries are not here."""
    version = metadata.version("torch").partition("+")[0]
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(
        "import ctypes\nctypes.CDLL('libcudart.so.11.0')\n__version__ = '2.13.0+cu118'\n"
    )
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "RECORD").write_text(f"torch/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    (info / "INSTALLER").write_text("pip\n")


def missing_module(site: Path, _: Path) -> None:
    """safetensors of which only half was copied."""
    folder = copy_of("safetensors", site)
    replaced(folder / "__init__.py", b"from .nowhere import save\n")


def twice(site: Path, _: Path) -> None:
    info = site / "peft-0.19.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.19.0\n")


def old(name: str, version: str) -> Callable[[Path, Path], None]:
    """The real package in an old version."""

    def plant(site: Path, _: Path) -> None:
        pip = [str(site.parents[2] / "bin/python"), "-m", "pip", "install", "-qq", "--no-deps", "--ignore-installed"]
        subprocess.run([*pip, "--only-binary", ":all:", f"{name}=={version}"], check=True, env=clean())

    return plant


def file_here(name: str, text: str = "answer = 42\n") -> Callable[[Path, Path], None]:
    def plant(_: Path, folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return plant


def cut_download(_: Path, folder: Path) -> None:
    """A hub's cache as a download leaves it that was cut off: the link is there, the weights are not."""
    snapshot = folder / "hf/hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")


CASES = [
    Case("torch of another CUDA", "imports", "libcudart.so.11.0", plant=wrong_torch, network=True),
    Case("transformers too old", "packages", "transformers (4.57", plant=old("transformers", "4.57.1"), network=True),
    Case("numpy of the old ABI", "packages", "numpy (1.26.4", plant=old("numpy", "1.26.4"), network=True),
    Case("tokenizers' library cut off", "imports", "tokenizers cannot be imported", plant=no_library, network=True),
    Case("half a package", "imports", "safetensors cannot be imported", plant=missing_module, network=True),
    Case("two versions of a package", "versions", "peft is installed twice", plant=twice),
    Case("old pip", "pip", "cannot say what an install would change", plant=old("pip", "21.3.1"), network=True),
    Case("torch.py in the current folder", "shadows", "instead of the real torch", plant=file_here("torch.py")),
    Case("a folder lockstep in the current folder", "shadows", "real lockstep", plant=file_here("lockstep/__init__.py")),
    Case(
        "PYTHONPATH with another numpy", "imports", "by PYTHONPATH", "export PYTHONPATH=$PWD/old",
        file_here("old/numpy/__init__.py", "raise ImportError('made for Python 2: ' + __file__)\n"),
    ),
    Case(
        "PYTHONPATH with a module of Python", "shadows", "real this", "export PYTHONPATH=$PWD/old", file_here("old/this.py"),
    ),
    Case(
        "LD_LIBRARY_PATH with a broken library", "imports", "by LD_LIBRARY_PATH", "export LD_LIBRARY_PATH=$PWD/lib",
        file_here("lib/libstdc++.so.6", "not a library"),
    ),
    Case("text is not UTF-8", "encoding", "files are read as", "export LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=0"),
    Case("no folder for temporary files", "temporary", "cannot be written", "export TMPDIR=/proc/none"),
    Case("few open files", "limits", "200 open files", "ulimit -Sn 200"),
    Case("few processes", "limits", "processes are allowed", "ulimit -Su 900"),
    Case("small files alone", "limits", "a file may have", "ulimit -Sf 500000"),
    Case("little address space", "limits", "of address space", "ulimit -Sv 60000000"),
    Case("a proxy that does not answer", "proxy", "does not answer", "export HTTPS_PROXY=http://127.0.0.1:9"),
    Case("cache that cannot be written", "cache", "cannot be written", "export LOCKSTEP_CACHE=/proc/lockstep"),
    Case("too many threads", "threads", "OMP_NUM_THREADS = 512", "export OMP_NUM_THREADS=512"),
    Case("a compiler that is not there", "compiler", "which is not there", "export CC=/opt/none/gcc"),
    Case("a download that was cut off", "model cache", "org/name is incomplete", "export HF_HOME=$PWD/hf", cut_download),
    Case(
        "offline without the model", "model", "HF_HUB_OFFLINE is set", "export HF_HUB_OFFLINE=1 HF_HOME=$PWD/empty",
        words="smoke model=org/not-here",
    ),
    Case("no shared memory", "shared memory", "0.0", "mount -t tmpfs -o size=1m tmpfs /dev/shm", root=True),
    Case("no loopback", "loopback", "127.0.0.1", ":", root=True),
]  # fmt: skip


def clean() -> dict[str, str]:
    """This process's environment without what a case sets."""
    unset = (
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "HF_HUB_OFFLINE",
        "TMPDIR",
        "VIRTUAL_ENV",
        "PYTHONUTF8",
        "OMP_NUM_THREADS",
    )
    return {name: value for name, value in os.environ.items() if name not in unset}


def environment(place: Path) -> Path:
    """An environment that has the packages of this one behind its own; returns its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    site = next(place.glob("lib/python*/site-packages"))
    (site / "behind.pth").write_text(f"{SITE}\n{ROOT}\n")
    return site


def run(case: Case, folder: Path) -> Result:
    """Break, ask doctor, paste its fix, ask doctor again."""
    site = environment(folder / "env")
    here = folder / "here"
    here.mkdir()
    if case.plant:
        case.plant(site, here)
    asked = case.words or f"--only {shlex.quote(case.check)}"  # the whole list takes a minute
    doctor = f"python -P -m lockstep doctor {asked} --json"
    lines = [
        f"export PATH={shlex.quote(str(folder / 'env/bin'))}:$PATH",
        f"cd {shlex.quote(str(here))}",
        case.shell,
        f"{doctor} > {folder}/before.json 2> {folder}/before.err || true",
        f"PYTHONPATH= LD_LIBRARY_PATH= {shlex.quote(sys.executable)} {ROOT}/benchmarks/breakages.py --fix {folder}/before.json "
        f"'{case.check}' {shlex.quote(case.says)} > {folder}/fix.sh",
        f". {folder}/fix.sh > {folder}/fix.log 2>&1",
        f"{doctor} > {folder}/after.json 2> {folder}/after.err || true",
    ]
    command = ["bash", "-c", "\n".join(lines)]
    if case.root:
        command = ["unshare", "--net" if case.check == "loopback" else "--mount", *command]
    subprocess.run(command, env=clean(), check=False, capture_output=True, timeout=1200)
    before, after = (_matching(folder / name, case) for name in ("before.json", "after.json"))
    whole = _checks(folder / "after.json")
    mended = (
        bool(whole) and after is None and not any(c["name"] == case.check and c["verdict"] == "fail" for c in whole)
    )
    if before is None:
        return Result(case.name, False, placeless((folder / "before.err").read_text())[-300:], "", False)
    return Result(case.name, True, placeless(before["found"]), placeless(before["fix"]), mended)


def _checks(path: Path) -> list[dict[str, str]]:
    try:
        return list(json.loads(path.read_text())["checks"])
    except (OSError, ValueError):
        return []


def _matching(path: Path, case: Case) -> dict[str, str] | None:
    found = (c for c in _checks(path) if c["name"] == case.check and c["verdict"] != "ok" and case.says in c["found"])
    return next(found, None)


def possible(case: Case) -> bool:
    return not case.root or (os.geteuid() == 0 and shutil.which("unshare") is not None)


def placeless(text: str) -> str:
    """A text without the folders of the machine that it was said on."""
    text = text.replace(str(SITE), "SITE").replace(sys.executable, "python").replace(str(ROOT), ".")
    text = re.sub(r"[^\s'\"]*/env/bin/python", "python", text)
    text = re.sub(r"[^\s'\"]*/lib/python[\d.]+/site-packages", "SITE", text)
    return re.sub(r"/[^\s'\"]*/here/?", "", text).replace(f"{Path.home()}/", "~/")


def table(results: list[Result]) -> str:
    def shown(text: str) -> str:
        return text.replace("|", "\\|")

    named = sum(one.named for one in results)
    mended = sum(one.mended for one in results)
    lines = [
        f"Made by `python -m benchmarks.breakages`: of {len(results)}, {named} are named, {mended} right after the fix. "
        "Doctor was asked for the check that is meant (`--only`): the others would take a minute.",
        "",
        "| broken on purpose | doctor says | fix, as pasted | right after it |",
        "|---|---|---|---|",
    ]
    for one in results:
        cells = (one.name, shown(one.found), f"`{shown(one.fix)}`" if one.fix else "–", "yes" if one.mended else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_page(results: list[Result]) -> None:
    text = PAGE.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    PAGE.write_text(text[:begin] + table(results) + text[end:])


def stored() -> list[Result]:
    """The latest reading of every case, in the order of the cases."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {one.name: one for one in (Result(**json.loads(line)) for line in lines)}
    return [known[case.name] for case in CASES if case.name in known]


def keep(result: Result) -> None:
    """Put a reading into the file and the page."""
    from filelock import FileLock

    with FileLock(str(Path(tempfile.gettempdir()) / "lockstep-breakages.lock")):
        results = {one.name: one for one in stored()} | {result.name: result}
        RESULTS.write_text("".join(json.dumps(asdict(one)) + "\n" for one in results.values()))
        write_page(stored())


def main(argv: list[str]) -> int:
    if argv[:1] == ["--fix"]:
        path, check, says = argv[1:]
        case = Case("", check, says)
        found = _matching(Path(path), case)
        print(found["fix"] if found else ":")
        return 0
    chosen = [case for case in CASES if not argv or any(word in (case.name, case.check) for word in argv)]
    results = []
    for case in chosen:
        if not possible(case):
            print(f"{case.name}: left out, it needs root", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="lockstep-broken-") as folder:
            result = run(case, Path(folder))
        results.append(result)
        print(
            f"{result.name}: named {result.named}, mended {result.mended}: {result.found} -> {result.fix}", flush=True
        )
        keep(result)
    return int(not all(one.named and one.mended for one in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
