"""Checks of the Python environment. They work even if packages are broken, because they import only the standard library."""

from __future__ import annotations

import json
import locale
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.doctor.check import Check, Checking

CORE = (
    "numpy", "torch", "tokenizers", "safetensors", "transformers", "peft", "pyarrow", "pydantic", "huggingface_hub", "httpx",
    "jinja2", "psutil", "re2",
)  # fmt: skip
"""Modules that every run loads."""
DISTRIBUTION = {"re2": "google-re2", "huggingface_hub": "huggingface-hub"}
PIP = f"{shlex.quote(sys.executable)} -m pip"
OLDEST_PIP = (22, 2)
"""First version that can say what it would do (`pip install --dry-run --report`)."""
SECONDS = 300.0
TRY = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    importlib.import_module(name)
print("", flush=True)
"""
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
LOCAL = "127.0.0.1"
_WORKED: set[tuple[str | None, ...]] = set()
"""Variables of the environment under which this process has seen all of CORE work."""


def environment_checks() -> list[tuple[str, Checking]]:
    """Return the checks by name, in the order in which they are shown."""
    return [
        ("imports", _core_imports),
        ("versions", check_versions),
        ("shadows", lambda: check_shadows(Path.cwd(), os.environ.get("PYTHONPATH", ""))),
        ("pip", check_pip),
        ("encoding", check_encoding),
        ("temporary", check_temporary),
        ("proxy", lambda: check_proxy(os.environ)),
        ("model cache", check_model_cache),
    ]


def _core_imports() -> list[Check]:
    """Import what every run loads; what was seen to work is not tried again by this process, for it takes seconds."""
    found = tuple(os.environ.get(name) for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"))
    if found in _WORKED:
        return [_importable(len(CORE))]
    checks = check_imports()
    if all(check.verdict == "ok" for check in checks):
        _WORKED.add(found)
    return checks


def _importable(count: int) -> Check:
    return Check("imports", "ok", f"{count} packages can be imported")


def check_imports(modules: Sequence[str] = CORE) -> list[Check]:
    """Import each module in processes of their own: a missing library, a broken file and a crash are all named."""
    broken, waiting = [], list(modules)
    while waiting:
        command = [sys.executable, "-P", "-c", TRY, *waiting]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            break
        reached = [line for line in done.stdout.splitlines() if line in waiting]
        failed = reached[-1] if reached else waiting[0]
        said = done.stderr.strip().splitlines() or [f"its import ended the process ({done.returncode})"]
        broken.append(judge_import(failed, said[-1], os.environ, version_of(failed)))
        waiting = waiting[waiting.index(failed) + 1 :]
    return broken or [_importable(len(modules))]


def judge_import(module: str, said: str, environment: Mapping[str, str], version: str | None) -> Check:
    """`said`: the last line of the error; `version`: the installed one, None for what is not installed."""
    found = f"{module} cannot be imported: {said}"
    if any(folder and folder in said for folder in environment.get("LD_LIBRARY_PATH", "").split(":")):
        return Check("imports", "fail", f"{found} (by LD_LIBRARY_PATH)", "unset LD_LIBRARY_PATH")
    if any(folder and folder in said for folder in environment.get("PYTHONPATH", "").split(":")):
        return Check("imports", "fail", f"{found} (by PYTHONPATH)", "unset PYTHONPATH")
    name = DISTRIBUTION.get(module, module)
    wanted = f"{name}=={version}" if version else name
    return Check("imports", "fail", found, f"{PIP} install --force-reinstall --no-deps {wanted}")


def check_versions() -> Check:
    """Find packages that are installed twice: which one counts then depends on the order of folders."""
    found: dict[str, dict[str, Path]] = {}
    for one in metadata.distributions():
        place = getattr(one, "_path", None)
        if one.name and isinstance(place, Path):
            found.setdefault(one.name.lower().replace("_", "-"), {}).setdefault(one.version, place)
    for name, versions in sorted(found.items()):
        if len(versions) > 1:
            shown = " and ".join(f"{version} in {place.parent}" for version, place in versions.items())
            stale = [place for version, place in versions.items() if version != _own_version(name)] or [
                *versions.values()
            ]
            fix = f"rm -r {shlex.quote(str(stale[0]))}"
            return Check("versions", "fail", f"{name} is installed twice: {shown}", fix)
    return Check("versions", "ok", f"{len(found)} packages, each once")


def _own_version(name: str) -> str | None:
    """Return the version that the module itself says."""
    command = [
        sys.executable,
        "-P",
        "-c",
        "import importlib, sys; print(importlib.import_module(sys.argv[1]).__version__)",
    ]
    done = subprocess.run([*command, name.replace("-", "_")], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def check_shadows(folder: Path, pythonpath: str) -> Check:
    """Find files in the current folder, or in PYTHONPATH, that Python takes instead of a package or of its own modules."""
    names = {"lockstep", *CORE, *sys.stdlib_module_names}
    own = Path(__file__).parents[2]
    for place in (folder, *(Path(one) for one in pythonpath.split(":") if one)):
        if not place.is_dir() or place.resolve() == own.resolve():
            continue
        for path in sorted(place.iterdir()):
            package = path.is_dir() and (path / "__init__.py").is_file()
            if path.stem in names and (path.suffix == ".py" or (package and not path.suffix)):
                if place == folder:
                    fix = f"mv {shlex.quote(str(path))} {shlex.quote(str(path.with_name(f'my_{path.name}')))}"
                else:
                    fix = "unset PYTHONPATH"
                return Check("shadows", "fail", f"{path} is taken instead of the real {path.stem}", fix)
    return Check("shadows", "ok", "no file here has the name of a package")


def check_pip() -> Check:
    version = version_of("pip")
    if version is None:
        return Check("pip", "warn", "not installed here", f"{shlex.quote(sys.executable)} -m ensurepip")
    digits = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if digits < OLDEST_PIP:
        found = f"{version} cannot say what an install would change"
        return Check("pip", "warn", found, f"{PIP} install --upgrade pip")
    return Check("pip", "ok", version)


def check_encoding() -> Check:
    """Check that text files and names are read as UTF-8."""
    files, names = locale.getpreferredencoding(False), sys.getfilesystemencoding()
    if {files.lower().replace("-", ""), names.lower().replace("-", "")} != {"utf8"}:
        return Check("encoding", "fail", f"files are read as {files}, names as {names}", "export PYTHONUTF8=1")
    return Check("encoding", "ok", "UTF-8")


def check_temporary() -> Check:
    """Check the folder for temporary files, where pip, torch and rsync work."""
    wanted = next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")
    try:
        with tempfile.NamedTemporaryFile(dir=wanted) as file:
            file.write(b"\0")
        free = shutil.disk_usage(wanted).free
    except OSError as error:
        return Check("temporary", "fail", f"{wanted} cannot be written: {error.strerror}", "export TMPDIR=/var/tmp")
    if free < 256 << 20:
        return Check("temporary", "fail", f"{wanted} has {free / 2**20:.0f} MiB free", "export TMPDIR=/var/tmp")
    return Check("temporary", "ok", f"{wanted}, {free / 2**30:.1f} GiB free")


def check_proxy(environment: Mapping[str, str]) -> Check:
    """Check that each proxy answers, and that connections of this machine to itself do not go through one."""
    named = {name: environment[name] for name in PROXIES if environment.get(name)}
    for name, address in named.items():
        parts = urlsplit(address if "://" in address else f"http://{address}")
        try:
            with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=3):
                pass
        except (OSError, ValueError) as error:
            found = (
                f"{name} names {parts.hostname}:{parts.port}, which does not answer, so nothing can be fetched: {error}"
            )
            return Check(
                "proxy", "warn", found, f"unset {' '.join(other for other in named if named[other] == address)}"
            )
    direct = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    if named and LOCAL not in direct and direct != "*":
        fix = f"export NO_PROXY={','.join(part for part in (direct, LOCAL, 'localhost') if part)}"
        return Check("proxy", "warn", f"{', '.join(named)} would be asked for {LOCAL}, too", fix)
    return Check("proxy", "ok", ", ".join(named) or "none")


def check_model_cache() -> Check:
    """Find models of a hub whose download was cut off: files that lead to nothing."""
    home = os.environ.get("HF_HUB_CACHE") or str(Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    folder = Path(home).expanduser()
    for model in sorted(folder.glob("models--*")):
        links = [path for path in model.glob("snapshots/*/*") if path.is_symlink() and not path.exists()]
        index = [path for path in model.glob("snapshots/*/model.safetensors.index.json") if path.exists()]
        parts = [place.parent / name for place in index for name in _parts(place)]
        if missing := [*links, *(path for path in parts if not path.exists())]:
            name = model.name.removeprefix("models--").replace("--", "/")
            found = f"{name} is incomplete: {missing[0].name} is missing; a run would fetch it again"
            return Check("model cache", "warn", found, f"rm -r {shlex.quote(str(model))}")
    return Check("model cache", "ok", str(folder))


def _parts(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return {"model.safetensors"}


def version_of(module: str) -> str | None:
    """Return the installed version of a module's or distribution's package; None if there is none."""
    try:
        return metadata.version(DISTRIBUTION.get(module, module))
    except metadata.PackageNotFoundError:
        return None
