"""Builds csrc/cpu.cpp, once per instruction set, and picks the one for this machine. Knows no torch.

    python -m engine.ops.compile [DIRECTORY]      builds all of this architecture (into the package by default)

A library depends on the sources, the flags and its instruction set, never on the machine that built it: it may be built
when an image is made and run elsewhere. Each instruction set is a file of its own, and only one that the processor has
is ever opened, so that no instruction can be illegal.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("csrc")
PACKAGED = Path(__file__).with_name("lib")
CPU_INFO = Path("/proc/cpuinfo")
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-fPIC", "-shared",
    "-fvisibility=hidden", "-Wno-psabi",
)  # fmt: skip
TIMEOUT_S = 300.0


class BuildError(Exception):
    """There is no library; the message says why and what to do."""


@dataclass(frozen=True)
class InstructionSet:
    """needs: what the processor must have, as Linux names it; flags: what the compiler is told."""

    name: str
    needs: tuple[str, ...]
    flags: tuple[str, ...]


_AVX2 = ("avx2", "fma", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
DOT = InstructionSet(
    "avx512bf16",
    (*_AVX512, "avx512_bf16", "avx512_vnni"),
    tuple(f"-m{name}" for name in (*_AVX512, "avx512bf16", "avx512vnni")),
)
TILES = InstructionSet("amx", (*DOT.needs, "amx_tile", "amx_bf16"), (*DOT.flags, "-mamx-tile", "-mamx-bf16"))
INSTRUCTION_SETS = {
    "x86_64": (
        TILES,
        DOT,
        InstructionSet("avx512", _AVX512, tuple(f"-m{name}" for name in _AVX512)),
        InstructionSet("avx2", _AVX2, tuple(f"-m{name}" for name in _AVX2)),
        InstructionSet("sse2", (), ()),
    ),
    "aarch64": (InstructionSet("neon", (), ("-march=armv8-a",)),),
}
"""By architecture, best first."""


def supported() -> tuple[InstructionSet, ...]:
    """Those that this machine can run, best first."""
    features = set(_cpu_info("flags").split())
    sets = INSTRUCTION_SETS.get(platform.machine(), ())
    return tuple(each for each in sets if features.issuperset(each.needs))


def load_library(cache_dir: Path | None = None, instruction_set: InstructionSet | None = None) -> ctypes.CDLL:
    """The compiled operations, of the fastest instruction set or the one asked for. Raises BuildError where there is
    no compiler, or it fails."""
    sets = supported()
    if not sets:
        raise BuildError(f"no native operations for {platform.system()} on {platform.machine()}")
    problem = BuildError("the system does not let this process use what its processor has")
    for each in sets if instruction_set is None else (instruction_set,):
        try:
            library = _open(each, cache_dir)
        except BuildError as error:  # an old compiler does not know the newest instructions
            if instruction_set is None:
                log.warning("no native operations for %s, the next best are tried: %s", each.name, error)
            problem = error
            continue
        if library.chorus_may_run() and (
            each is not DOT or instruction_set is DOT or _is_dot_faster(library, cache_dir)
        ):
            return library
    raise problem


def _open(instruction_set: InstructionSet, cache_dir: Path | None) -> ctypes.CDLL:
    name = f"cpu-{instruction_set.name}-{_digest(instruction_set)}.so"
    try:
        for directory in (PACKAGED, *cache_dirs(cache_dir)):
            if (directory / name).is_file():
                return ctypes.CDLL(str(directory / name))
        for directory in cache_dirs(cache_dir):
            build(instruction_set, directory / name)
            return ctypes.CDLL(str(directory / name))
    except OSError as error:
        raise BuildError(f"the native operations can't be opened: {error}") from error
    raise BuildError("no directory to keep the native operations in")


def _digest(instruction_set: InstructionSet) -> str:
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    flags = " ".join((*FLAGS, *instruction_set.flags, platform.machine()))
    return hashlib.sha256(b"\0".join([*parts, flags.encode()])).hexdigest()[:20]


def cache_dirs(cache_dir: Path | None = None) -> Iterator[Path]:
    """Directories of this user alone, that libraries may be written to."""
    user_dir = Path(tempfile.gettempdir()) / f"chorus-{os.getuid()}"
    for directory in (cache_dir, Path.home() / ".cache" / "chorus", user_dir):
        if directory is None:
            continue
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            yield directory


def _is_dot_faster(library: ctypes.CDLL, cache_dir: Path | None) -> bool:
    """Whether this processor multiplies bf16 faster by its dot product than by widening to fp32. Measured once and
    remembered, so that a machine always gives the same bits."""
    processor = hashlib.sha256(f"{_cpu_info('model name')} {_cpu_info('flags')}".encode()).hexdigest()[:12]
    for directory in cache_dirs(cache_dir):
        note = directory / f"cpu-dot-{processor}"
        if note.is_file():
            return note.read_text().strip() == "1"
        library.chorus_dot_speedup.restype = ctypes.c_double
        is_faster = bool(library.chorus_dot_speedup() > 1.0)
        draft = note.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(f"{int(is_faster)}\n")
        draft.replace(note)
        return is_faster
    return True


def _cpu_info(key: str) -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def build(instruction_set: InstructionSet, path: Path) -> None:
    """To a private name first: several processes may build at a time, and none may load a half-written file."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError("no C++ compiler found (install g++)")
    log.warning("building the native CPU operations for %s (once, some seconds)", instruction_set.name)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *FLAGS, *instruction_set.flags, str(SOURCES / "cpu.cpp"), "-o", str(draft)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        draft.replace(path)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{compiler}: {error.stderr.decode(errors='replace')[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {TIMEOUT_S:.0f} s") from error
    finally:
        draft.unlink(missing_ok=True)


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED
    directory.mkdir(parents=True, exist_ok=True)
    for each in INSTRUCTION_SETS.get(platform.machine(), ()):
        build(each, directory / f"cpu-{each.name}-{_digest(each)}.so")


if __name__ == "__main__":
    main()
