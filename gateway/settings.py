"""Settings: what an operator can choose. The only reader of the environment and of chorus.toml.

Every setting has one name in three spellings: `--max-upload` on the command line, CHORUS_MAX_UPLOAD in the environment,
`max_upload` in chorus.toml. The command line wins over the environment, the environment over the file. An empty value
is no value, an unknown name in the file is an error.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from adapters.bucket import Bucket, BucketConfig
from engine.config import ConfigError, EngineConfig, parse_size
from tenants.addresses import check_addresses

MIN_ADMIN_KEY = 16
SECRET = ("admin_key", "pepper", "engine_key", "aws")
"""Settings whose values are never shown."""
AWS = frozenset((
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_SKIP_SIGNATURE",
    "AWS_REQUEST_PAYER", "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_CHECKSUM_ALGORITHM",
))  # fmt: skip
"""What of Amazon's usual variables counts."""
MAX_SOCKET_PATH = 96
"""Bytes of a Unix socket's path; the kernel's limit is 107 (Linux) or 103 (macOS), and names are appended to it."""


def split_list(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def check_place(value: str) -> str:
    """A directory, or s3://bucket/prefix. Raises ValueError."""
    if "://" in value and (not value.startswith("s3://") or not urlsplit(value).netloc or "?" in value or "@" in value):
        raise ValueError("give a directory, or s3://bucket/prefix; credentials come from AWS_* variables")
    return value


def run_dir_of(data_dir: Path) -> Path:
    """Where the sockets lie: in the data directory, or, where its path is too long for a socket, in a directory of the
    system's temporary one that belongs to this data directory and user alone."""
    run_dir = data_dir / "run"
    if len(os.fsencode(run_dir)) <= MAX_SOCKET_PATH - len("/engine.sock"):
        return run_dir
    mark = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"chorus-{os.getuid()}-{mark}"


Size = Annotated[int | None, BeforeValidator(parse_size)]
Names = Annotated[tuple[str, ...], BeforeValidator(split_list)]


class Settings(BaseModel):
    """All settings of one start. Paths are absolute; whatever can be derived is derived when it is not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field("", description="checkpoint directory, or a name that `chorus pull` knows")
    served_name: str = Field("", description="what clients call the base model; default: the directory's name")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 = any free one")
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="administration and metrics on a port of their own, and only there"
    )
    admin_host: str = Field("", description="address of the admin port; default: --host")
    data_dir: Path = Field(Path("data"), validate_default=True, description="everything that Chorus keeps")
    run_dir: Path = Field(default_factory=lambda data: run_dir_of(data["data_dir"]), description="sockets")
    database_url: str = Field(
        default_factory=lambda data: f"sqlite+aiosqlite:///{data['data_dir']}/chorus.db",
        description="postgresql+asyncpg://… or sqlite+aiosqlite:///…; default: SQLite in the data directory",
    )
    redis_url: str = Field("", description="redis://…, rediss://…, unix://…; default: a private redis-server")
    adapter_store: str = Field(
        "", description="where adapters are kept: a directory, or s3://bucket/prefix; default: in the data directory"
    )
    adapter_cache_bytes: Annotated[int, BeforeValidator(parse_size)] = Field(
        20 << 30, ge=1, description="adapters of a bucket that are kept on the local disk"
    )
    adapter_sources: Names = Field(
        (), description="directories or s3://bucket/prefix with tenant/name/… that are synced, comma-separated"
    )
    source_every_s: float = Field(30, gt=0, description="seconds between two looks at a source")
    private_sources: bool = Field(False, description="sources may be on servers with private addresses")
    aws: Mapping[str, str] = Field(
        {}, repr=False, validate_default=True, description="AWS_* variables, for adapters in a bucket"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto = bfloat16")
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="keeps the base's weights in 8 or 4 bits; adapters and KV stay as they are"
    )
    quantization_group: int = Field(128, ge=32, description="weights that share a scale: 32, 64, 96, …")
    workers: int = Field(1, ge=1, le=64, description="gateway processes sharing the port")
    max_model_len: int | None = Field(None, ge=1, description="prompt + output tokens; default: the model's limit")
    kv_memory: Size = Field(None, description="memory for KV blocks: auto or a size")
    adapter_memory: Size = Field(None, description="memory for adapters: auto or a size")
    kv_host_bytes: Size = Field(None, description="host memory for KV blocks that left the device: auto, 0 or a size")
    kv_disk_dir: Path | None = Field(None, description="directory for such blocks; it survives a restart")
    kv_disk_bytes: Annotated[int, BeforeValidator(parse_size)] = Field(
        16 << 30, ge=1, description="how much of them the directory may hold"
    )
    swap: Literal["on", "off", "auto"] = Field(
        "auto", description="whether they come back by copy: on, if quicker (auto), not for preempted requests (off)"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences that run in one step")
    max_batched_tokens: int = Field(1024, ge=1, description="tokens computed in one step")
    max_lora_rank: int = Field(64, ge=1, description="adapters above this rank are refused")
    adapter_wait: float = Field(10, gt=0, description="seconds that a request waits for its adapter to load")
    max_upload: Annotated[int, BeforeValidator(parse_size)] = Field(1 << 30, ge=1, description="largest adapter")

    adapter_grace: float | None = Field(
        None, ge=0, description="seconds that files stay which no adapter refers to; default: 2 request timeouts, 1 h"
    )
    max_adapters_per_tenant: int | None = Field(None, ge=0, description="adapters that a tenant may keep")
    max_adapter_bytes_per_tenant: Size = Field(None, ge=0, description="bytes of adapters that a tenant may keep")

    max_body: Annotated[int, BeforeValidator(parse_size)] = Field(8 << 20, ge=1, description="largest JSON body")
    request_timeout_s: float = Field(600, gt=0, description="a request that has not ended by then fails")
    ageing_s: float = Field(30, gt=0, description="a starved request is lifted to the class above after so long")
    max_waiting: int = Field(8192, ge=1, description="requests that may wait in an engine")
    max_waiting_per_tenant: int = Field(1024, ge=1, description="requests of one tenant that may wait in an engine")
    drain_s: float = Field(30, ge=0, description="how long running streams may go on after SIGTERM")
    conversation_ttl_s: int = Field(30 * 86400, ge=1, description="unused responses and conversations are kept")
    engine_endpoints: Names = Field(
        default_factory=lambda data: (f"ipc://{data['run_dir']}/engine.sock",),
        description="where engines listen: ipc://… or tcp://host:port (needs engine_key), comma-separated",
    )
    engine_key: str = Field("", repr=False, description="shared by engines and gateways that talk over TCP")
    admin_key: str = Field("", repr=False, description="key of the admin API; default: made at first start")
    pepper: str = Field(
        "", repr=False, description="secret that API keys are hashed with; default: made at first start"
    )
    trusted_proxies: Names = Field(
        (), description="addresses or networks of proxies whose X-Forwarded-For tells where a client is"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning, error")

    @field_validator("trusted_proxies", mode="after")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_addresses(value, "trusted_proxies") or ())

    @field_validator("adapter_store", mode="after")
    @classmethod
    def _store_url(cls, value: str) -> str:
        return check_place(value)

    @field_validator("adapter_sources", mode="after")
    @classmethod
    def _source_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_place, value))

    @field_validator("aws", mode="after")
    @classmethod
    def _usable(cls, value: Mapping[str, str], info: ValidationInfo) -> Mapping[str, str]:
        unknown = sorted(value.keys() - AWS)
        if unknown:
            raise ValueError(f"{unknown[0]} means nothing here")
        for place in (info.data.get("adapter_store", ""), *info.data.get("adapter_sources", ())):
            if "://" in place:
                Bucket(BucketConfig(place, value)).check()
        return value

    @field_validator("data_dir", "run_dir", mode="after")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("kv_disk_dir", mode="after")
    @classmethod
    def _absolute_or_none(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def store_dir(self) -> Path:
        """Root of the adapter store; of its stages and cache, if that is a bucket."""
        is_here = self.adapter_store and self.bucket is None
        return Path(self.adapter_store).expanduser().absolute() if is_here else self.data_dir / "adapters"

    @property
    def bucket(self) -> BucketConfig | None:
        """Where adapters are kept, if not on a local disk."""
        if "://" not in self.adapter_store:
            return None
        return BucketConfig(self.adapter_store, self.aws, self.adapter_cache_bytes)

    @property
    def adapter_grace_s(self) -> float:
        """Longer than any request or upload that may need the files, unless the operator knows better."""
        return 2 * self.request_timeout_s + 3600 if self.adapter_grace is None else self.adapter_grace

    @property
    def model_dir(self) -> Path:
        """The checkpoint: `model` itself if it is a directory, else where `chorus pull` puts a model of this name."""
        if not self.model:
            raise ConfigError("no model chosen: give a directory or a name, such as smollm2-135m-instruct")
        path = Path(self.model).expanduser()
        return path.absolute() if path.is_dir() else self.models_dir / self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def base_name(self) -> str:
        """What clients call the base model; no adapter can have this name."""
        return self.served_name or self.model_dir.name

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model_dir,
            store_dir=self.store_dir,
            bucket=self.bucket,
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            quantization_group=self.quantization_group,
            max_model_len=self.max_model_len,
            kv_memory_bytes=self.kv_memory,
            adapter_memory_bytes=self.adapter_memory,
            kv_host_bytes=self.kv_host_bytes,
            kv_disk_dir=self.kv_disk_dir,
            kv_disk_bytes=self.kv_disk_bytes,
            swap=self.swap,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_lora_rank=self.max_lora_rank,
            adapter_wait_s=self.adapter_wait,
            ageing_s=self.ageing_s,
            max_waiting=self.max_waiting,
            max_waiting_per_lane=self.max_waiting_per_tenant,
        )

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Self:
        """Flags (None = not given) over CHORUS_* over chorus.toml (CHORUS_CONFIG, else ./chorus.toml if there)."""
        environ = os.environ if environ is None else environ
        chosen = _read_toml(environ.get("CHORUS_CONFIG", ""))
        chosen |= {
            name: environ[variable]
            for name in cls.model_fields
            if name != "aws" and environ.get(variable := f"CHORUS_{name.upper()}", "") != ""
        }
        aws = {name: environ[name] for name in AWS if environ.get(name, "") != ""}
        if aws:
            chosen["aws"] = chosen.get("aws", {}) | aws
        chosen |= {name: value for name, value in (flags or {}).items() if value is not None}
        try:
            return cls(**chosen)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error


def _read_toml(chosen: str) -> dict[str, Any]:
    path = Path(chosen or "chorus.toml")
    if not chosen and not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        if problem["type"] == "default_factory_not_called":
            continue
        name = ".".join(str(part) for part in problem["loc"])
        message = "there is no such setting" if problem["type"] == "extra_forbidden" else problem["msg"]
        given = "" if name.split(".")[0] in SECRET else f" (given: {problem['input']!r})"
        lines.append(f"{name}: {message}{given}")
    return "; ".join(lines)


def keep_secret(path: Path, prefix: str = "") -> tuple[str, bool]:
    """The secret that the file holds, made (mode 0600, never half written) if there is none. → (secret, is_new)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(prefix + secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails if another process was first: then its secret counts
            return path.read_text().strip(), True
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text().strip(), False


def with_secrets(settings: Settings) -> tuple[Settings, bool]:
    """Fills admin_key and pepper from the data directory, making them at the first start. → (settings, the admin key
    is new and should be shown). Raises ConfigError."""
    update: dict[str, str] = {}
    is_new = False
    if settings.admin_key and len(settings.admin_key) < MIN_ADMIN_KEY:
        raise ConfigError(f"admin_key: it must have {MIN_ADMIN_KEY} characters or more")
    if not settings.admin_key:
        update["admin_key"], is_new = keep_secret(settings.data_dir / "admin.key", "chorus_admin_")
    if not settings.pepper:
        update["pepper"], _ = keep_secret(settings.data_dir / "pepper")
    return settings.model_copy(update=update), is_new
