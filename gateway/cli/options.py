"""Options of the command line, made from the fields of Settings: one name and one description for flag, environment
and file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from gateway.settings import Settings

PLACE = ("data_dir", "log_level")
STATE = ("database_url", "redis_url")
MODEL = ("served_name", "device", "dtype", "quantization", "quantization_group", "max_model_len", "kv_memory",
         "adapter_memory", "kv_host_bytes", "kv_disk_dir", "kv_disk_bytes", "swap", "max_num_seqs",
         "max_batched_tokens", "max_lora_rank", "adapter_wait")  # fmt: skip
HTTP = ("host", "port", "admin_port", "admin_host", "workers", "max_upload", "max_adapters_per_tenant",
        "max_adapter_bytes_per_tenant", "adapter_grace", "drain_s")  # fmt: skip
LINK = ("engine_endpoints",)
STORE = ("adapter_store", "adapter_cache_bytes")
GATEWAY = (*HTTP, *STATE, *STORE, "adapter_sources", *PLACE)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown_default(name: str) -> str:
    field = Settings.model_fields[name]
    if field.default_factory is not None or field.default in (None, ""):
        return ""
    is_size = isinstance(field.default, int) and field.default >= 1 << 20
    return f" [{field.default >> 20} MiB]" if is_size else f" [{field.default}]"


def option(name: str) -> inspect.Parameter:
    """The typer option of a setting. All are text here: Settings checks them, wherever they come from."""
    note = typer.Option(
        flag(name),
        help=(Settings.model_fields[name].description or "") + shown_default(name),
        envvar=f"CHORUS_{name.upper()}",
        show_default=False,
        metavar="VALUE",
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, note])


def with_settings(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option per named setting, and calls it with all of them loaded as `settings`. A parameter
    `model` of the command goes into the settings too."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]

        def run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in names}
            if "model" in arguments:
                flags["model"] = arguments["model"]
            command(**arguments, settings=Settings.load(flags))

        parameters = [*own, *map(option, names)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
