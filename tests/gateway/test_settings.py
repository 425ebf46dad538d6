"""Settings: three spellings of one name, sizes, secrets of the first start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.config import ConfigError
from gateway.cli.options import GATEWAY, LINK, MODEL, flag
from gateway.settings import AWS, MAX_SOCKET_PATH, Settings, parse_size, with_secrets

PROMISED = """
served-name host port data-dir database-url redis-url device dtype workers max-model-len kv-memory adapter-memory
kv-host-bytes kv-disk-dir kv-disk-bytes swap max-num-seqs max-batched-tokens max-lora-rank max-upload
"""


def test_flag_wins_over_environment_over_file(tmp_path: Path) -> None:
    """The same setting from three places: the nearest to the person counts."""
    file = tmp_path / "chorus.toml"
    file.write_text('port = 1\nworkers = 2\nmax_upload = "3MiB"\n')
    environ = {"CHORUS_CONFIG": str(file), "CHORUS_PORT": "4", "CHORUS_WORKERS": "5"}

    settings = Settings.load({"port": "6", "workers": None}, environ)

    assert (settings.port, settings.workers, settings.max_upload) == (6, 5, 3 << 20)


def test_every_promised_flag_is_a_setting() -> None:
    """`chorus serve` has every flag of the documentation, each also as CHORUS_* and in chorus.toml."""
    assert {f"--{name}" for name in PROMISED.split()} <= {flag(name) for name in (*MODEL, *GATEWAY, *LINK)}


def test_empty_values_are_no_values() -> None:
    """Compose passes unset variables as empty strings: they change nothing."""
    assert Settings.load({}, {"CHORUS_PORT": "", "CHORUS_SERVED_NAME": ""}) == Settings.load({}, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [("auto", None), ("", None), ("12", 12), ("1kB", 1000), ("1k", 1024), ("1KiB", 1024), ("1.5g", 3 << 29),
     ("2 GiB", 2 << 30), (" 1 MB ", 1_000_000), (7, 7)],
)  # fmt: skip
def test_sizes(text: object, size: int | None) -> None:
    """Sizes read as people write them."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "70000"), ("port", "tcp://10.0.0.1:8000"), ("workers", "0"), ("kv_memory", "lots"), ("dtype", "int8"),
     ("max_upload", "auto"), ("drain_s", "-1")],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(name: str, value: str) -> None:
    """A wrong value is one line that names the setting and shows what was given."""
    with pytest.raises(ConfigError, match=name) as error:
        Settings.load({}, {f"CHORUS_{name.upper()}": value})

    assert repr(value) in str(error.value) or value == "auto"
    assert "default factory" not in str(error.value)


def test_unknown_names_in_the_file_are_refused(tmp_path: Path) -> None:
    """A typing error in chorus.toml is no silent default."""
    file = tmp_path / "c.toml"
    file.write_text("prot = 1\n")

    with pytest.raises(ConfigError, match="prot: there is no such setting"):
        Settings.load({}, {"CHORUS_CONFIG": str(file)})


def test_a_missing_file_is_refused_if_it_was_named(tmp_path: Path) -> None:
    """CHORUS_CONFIG that points nowhere is an error, no chorus.toml at all is none."""
    with pytest.raises(ConfigError, match=r"none\.toml"):
        Settings.load({}, {"CHORUS_CONFIG": str(tmp_path / "none.toml")})


def test_adapters_may_be_kept_elsewhere(tmp_path: Path) -> None:
    """A directory or a bucket; how to get into the bucket comes from Amazon's usual variables, which CHORUS_AWS is not,
    over those of the file; what else begins with AWS_ is left alone."""
    file = tmp_path / "c.toml"
    file.write_text('adapter_store = "s3://b/p"\n[aws]\nAWS_REGION = "x"\nAWS_ENDPOINT_URL = "http://minio:9000"\n')
    environ = {"CHORUS_CONFIG": str(file), "AWS_REGION": "eu", "AWS_PROFILE": "me", "CHORUS_AWS": "{}"}

    far = Settings.load({"adapter_cache_bytes": "3GiB", "data_dir": tmp_path, "model": "x"}, environ)
    near = Settings.load({"adapter_store": str(tmp_path / "a")}, {})

    assert far.bucket is not None
    assert (far.bucket.url, far.bucket.cache_bytes) == ("s3://b/p", 3 << 30)
    assert far.bucket.options == {"AWS_REGION": "eu", "AWS_ENDPOINT_URL": "http://minio:9000"}
    assert (far.store_dir, far.engine_config().bucket) == (tmp_path / "adapters", far.bucket)
    assert (near.store_dir, near.bucket) == (tmp_path / "a", None)
    assert Settings(data_dir=tmp_path).store_dir == tmp_path / "adapters"
    assert Settings.model_validate_json(far.model_dump_json()).bucket == far.bucket


@pytest.mark.parametrize(
    "value", ["gs://b", "s3://", "http://b/x", "s3://key:secret@b/x", "s3://b/x?endpoint=y", "file:///x"]
)
def test_other_places_are_refused(value: str) -> None:
    """No other kind of URL is taken for a directory, and no secret belongs into one."""
    with pytest.raises(ConfigError, match=r"adapter_store: .*s3://bucket/prefix"):
        Settings.load({"adapter_store": value}, {})


@pytest.mark.parametrize("name", sorted(AWS))
def test_every_variable_of_amazon_is_understood(name: str) -> None:
    """What is let through means something to the client; a typing error in the file is refused without its value."""
    proper = {
        "AWS_ENDPOINT_URL": "http://x", "AWS_ENDPOINT_URL_S3": "http://x", "AWS_CHECKSUM_ALGORITHM": "SHA256",
        "AWS_SERVER_SIDE_ENCRYPTION": "AES256",
    }  # fmt: skip
    keys = {"AWS_ACCESS_KEY_ID": "hush", "AWS_SECRET_ACCESS_KEY": "hush"}
    chosen = {"adapter_store": "s3://b", "aws": keys | {name: proper.get(name, "true")}}
    assert Settings.load(chosen, {}).bucket is not None
    for wrong in ({name + "X": "hush"}, {"AWS_ACCESS_KEY_ID": "hush"}):
        with pytest.raises(ConfigError, match="aws: ") as error:
            Settings.load(chosen | {"aws": wrong}, {})
        assert "hush" not in str(error.value)


def test_secrets_are_made_once_and_only_ours_to_read(tmp_path: Path) -> None:
    """Admin key and pepper of the first start are kept with mode 0600, and are the same at the second."""
    first, is_new = with_secrets(Settings(data_dir=tmp_path))
    second, is_new_again = with_secrets(Settings(data_dir=tmp_path))

    assert is_new
    assert not is_new_again
    assert first.admin_key.startswith("chorus_admin_")
    assert (first.admin_key, first.pepper) == (second.admin_key, second.pepper)
    for name in ("admin.key", "pepper"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert sorted(os.listdir(tmp_path)) == ["admin.key", "pepper"]


def test_given_secrets_are_not_kept(tmp_path: Path) -> None:
    """CHORUS_ADMIN_KEY and CHORUS_PEPPER come from outside and stay there."""
    settings, is_new = with_secrets(Settings(data_dir=tmp_path, admin_key="a" * 16, pepper="p"))

    assert not is_new
    assert (settings.admin_key, settings.pepper) == ("a" * 16, "p")
    assert not os.listdir(tmp_path)


def test_an_admin_key_is_no_short_one(tmp_path: Path) -> None:
    """CHORUS_ADMIN_KEY may be any string, of 16 characters or more."""
    for key in ("any string of sixteen or more", "žluťoučký kůň 16"):
        assert with_secrets(Settings(data_dir=tmp_path, admin_key=key, pepper="p"))[0].admin_key == key
    with pytest.raises(ConfigError, match="16 characters"):
        with_secrets(Settings(data_dir=tmp_path, admin_key="a" * 15, pepper="p"))


def test_secrets_are_never_shown() -> None:
    """Neither repr() nor an error message tells a secret."""
    settings = Settings(admin_key="s3cret", pepper="s3cret", engine_key="s3cret", aws={"AWS_SESSION_TOKEN": "s3cret"})

    assert "s3cret" not in repr(settings)
    with pytest.raises(ConfigError) as error:
        Settings.load({"admin_key": 1234567}, {})
    assert "1234567" not in str(error.value)


def test_sockets_fit_the_kernel_wherever_the_data_lie(tmp_path: Path) -> None:
    """A data directory with a long path gets short socket paths, and always the same ones."""
    deep = tmp_path.joinpath(*["directory-with-a-long-name"] * 6)

    assert len(os.fsencode(Settings(data_dir=deep).run_dir)) < MAX_SOCKET_PATH
    assert Settings(data_dir=deep).run_dir == Settings(data_dir=deep).run_dir
    assert Settings(data_dir=deep).run_dir != Settings(data_dir=deep / "other").run_dir


def test_settings_survive_the_way_to_a_child(tmp_path: Path) -> None:
    """A child process gets exactly the settings of its parent."""
    settings = Settings(data_dir=tmp_path, kv_memory="1GiB", engine_endpoints="tcp://a:1,tcp://b:2", pepper="p")

    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_a_model_is_a_directory_or_a_pulled_name(tmp_path: Path) -> None:
    """A directory is used where it lies; a name, or a hub id, lies where `chorus pull` puts it."""
    (tmp_path / "mine").mkdir()

    assert Settings(data_dir=tmp_path, model=str(tmp_path / "mine")).model_dir == tmp_path / "mine"
    assert Settings(data_dir=tmp_path, model="org/name").model_dir == tmp_path / "models" / "name"
    assert Settings(data_dir=tmp_path, model="x").base_name == "x"
    assert Settings(data_dir=tmp_path, model="x", served_name="y").base_name == "y"
    with pytest.raises(ConfigError, match="no model chosen"):
        _ = Settings(data_dir=tmp_path).model_dir


def test_what_an_engine_gets_when_nothing_is_said(tmp_path: Path, tiny_llama: Path) -> None:
    """The numbers that docs/operating.md and the refusals speak of."""
    config = Settings(data_dir=tmp_path, model=str(tiny_llama)).engine_config()

    assert (config.max_waiting_per_lane, config.adapter_wait_s, config.max_lora_rank) == (1024, 10.0, 64)
    assert (config.swap, config.kv_host_bytes, config.kv_disk_dir) == ("auto", None, None)
