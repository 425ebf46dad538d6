"""Builds cpu.cpp for this machine's instruction set, once: the library is kept in the user's cache under the digest of
everything that it depends on. Knows no torch."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread",
    "-fPIC", "-shared", "-Wno-psabi",
)  # fmt: skip
TIMEOUT_S = 180.0


class BuildError(Exception):
    """There is no library; the message says why and what to do."""


def load_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The compiled operations. Raises BuildError where there is no compiler, or it fails."""
    compilers = [found for name in COMPILERS if (found := shutil.which(name))]
    if not compilers:
        raise BuildError("no C++ compiler found (install g++)")
    compiler = compilers[0]
    try:
        library = _library_path(compiler, cache_dir)
        if not library.exists():
            _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} could not build the native operations: {error}") from error


def _library_path(compiler: str, cache_dir: Path | None) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_S).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _instruction_set().encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    for directory in (
        cache_dir,
        Path.home() / ".cache" / "chorus",
        Path(tempfile.gettempdir()) / f"chorus-{os.getuid()}",
    ):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            return directory / f"cpu-{digest}.so"
    raise BuildError("no directory to keep the native operations in")


def _instruction_set() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, path: Path) -> None:
    """To a private name first: several processes may build at a time, and none may load a half-written file."""
    log.warning("building the native CPU operations (once, some seconds)")
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run(
            [compiler, *FLAGS, str(SOURCE), "-o", str(draft)], check=True, capture_output=True, timeout=TIMEOUT_S
        )
        draft.replace(path)
    except subprocess.CalledProcessError as error:
        raise BuildError(error.stderr.decode(errors="replace")[-2000:]) from error
    finally:
        draft.unlink(missing_ok=True)
