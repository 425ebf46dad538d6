"""vLLM's lists of adapters, in every form that its documentation gives; and names that fit here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.spec import AdapterInvalid
from gateway.cli.imports import NAME, own_names
from gateway.cli.vllm_modules import read_modules


def test_every_form(tmp_path: Path) -> None:
    """name=path, an object, a list of objects, one adapter's directory, a directory of adapters."""
    for name in ("many/one", "many/two", "single"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").touch()
    (tmp_path / "many" / "unrelated").mkdir()

    found = read_modules(
        [
            "sql=/models/sql=v2", '{"name": "chat", "path": "/c", "base_model_name": "llama"}',
            json.dumps([{"name": "org/x", "path": "/x"}, {"name": "y", "path": "~/y"}]),
            str(tmp_path / "single"), "", str(tmp_path / "many"),
        ]
    )  # fmt: skip

    assert {module.name: str(module.path) for module in found} == {
        "sql": "/models/sql=v2", "chat": "/c", "org/x": "/x", "y": str(Path("~/y").expanduser()),
        "single": str(tmp_path / "single"), "one": str(tmp_path / "many/one"), "two": str(tmp_path / "many/two"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "sources",
    [
        ["=/a"], ["a="], ["{"], ["[1]"], ['{"name": "a"}'], ['{"name": 1, "path": "/a"}'], ["/no/such/directory"],
        ['{"name": "a", "path": "/a", "rank": 3}'], ["a=/1", "a=/2"], ["[" * 100_000], ["[[]]"],
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused(sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is guessed, and one name never stands for two adapters."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterInvalid) as caught:
        read_modules(sources)

    assert caught.value.code == "modules_invalid"


def test_repositories_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's "owner/name" is what it has downloaded; a directory of that name here goes first, and what is in neither
    is left for its row to tell."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--sql-lora" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").touch()
    refs = tmp_path / "hub" / "models--org--sql-lora" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "chat").mkdir(parents=True)

    found = read_modules(["sql=org/sql-lora", '{"name": "chat", "path": "here/chat"}', "gone=org/other"])

    assert [module.path for module in found] == [snapshot, Path("here/chat"), Path("org/other")]


@given(st.lists(st.text(min_size=1, max_size=80), unique=True, max_size=8))
def test_names_fit_and_differ(names: list[str]) -> None:
    """Every name gets one that fits the pattern, nobody else's, and the same one next time; fitting ones stay."""
    found = own_names(names)

    assert set(found) == set(names)
    assert all(NAME.fullmatch(own) for own in found.values())
    assert len(set(found.values())) == len(names)
    assert all(found[name] == name for name in names if NAME.fullmatch(name))
    assert own_names(list(reversed(names))) == found


def test_names_stay_recognisable() -> None:
    """As near to the old name as the pattern allows; a mark tells apart what would become the same."""
    assert own_names(["org/sql lora", "modèle"]) == {"org/sql lora": "org-sql-lora", "modèle": "modele"}
    same = own_names(["a/b", "a b", "a-b"])
    assert same["a-b"] == "a-b"
    assert all(own.startswith("a-b-") for name, own in same.items() if name != "a-b")
