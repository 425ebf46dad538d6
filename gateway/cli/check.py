"""The door's checks, offline: what a server of this base would say of an adapter's directory. Knows no server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from adapters.new_tokens import keep_new_tokens
from adapters.spec import AdapterSpec
from adapters.storage import COMPANION_FILES, content_digest
from adapters.validation import Limits, validate_in_subprocess
from engine.config import ConfigError
from engine.model.config import ModelConfig
from gateway.cli.package import pack, parts, probes_of
from gateway.settings import Settings


def checked(settings: Settings, directory: Path, is_bare: bool = False) -> dict[str, Any]:
    """What the adapter is, as the server would show it. Raises AdapterError, ConfigError (of the base)."""
    config = ModelConfig.from_dir(settings.model_dir)
    limits = Limits(max_rank=settings.max_lora_rank, max_bytes=settings.max_upload)
    with TemporaryDirectory(prefix="chorus-check-") as temporary:
        files = Path(temporary)  # a copy: of a tokenizer only its new tokens stay
        pack(directory, files, is_bare)
        size = sum(path.stat().st_size for path in parts(files).values())
        spec = asyncio.run(validate_in_subprocess(files, config.base_shape(), limits))
        keep_new_tokens(files, spec.new_tokens)
        companions = {name: (files / name).read_bytes() for name in COMPANION_FILES if (files / name).is_file()}
        probes_of(files)
        if companions:
            warnings = _check_companions(companions, settings.model_dir, config.vocab_size, spec.num_added)
            spec = replace(spec, warnings=spec.warnings + warnings)
        return {
            "object": "adapter.check", "id": directory.resolve().name, "digest": f"sha256:{content_digest(files)}",
            "size_bytes": size, **_described(spec),
        }  # fmt: skip


def _check_companions(
    companions: dict[str, bytes], model_dir: Path, vocab_size: int, num_added: int
) -> tuple[str, ...]:
    """→ warnings. Raises AdapterError, ConfigError where the base's tokenizer, which they need, isn't there."""
    from engine.template_sandbox import TemplateSandbox
    from engine.text import Tokenizer, TokenizerError
    from gateway.profiles import check_companions

    try:
        tokenizer = Tokenizer(model_dir)
    except TokenizerError as error:
        raise ConfigError(str(error)) from error
    sandbox = TemplateSandbox(*tokenizer.template_setting, num_children=1)
    try:
        return check_companions(companions, sandbox, vocab_size + num_added, tokenizer).warnings
    finally:
        sandbox.close()


def _described(spec: AdapterSpec) -> dict[str, Any]:
    return {
        "rank": spec.rank, "target_modules": list(spec.target_modules), "num_modules": len(spec.modules),
        "num_tensors": spec.num_tensors,
        "scales": sorted({round(module.scale, 6) for module in spec.modules if module.rank}),
        "base_model": spec.base_model, "warnings": list(spec.warnings), "status": "ready",
    }  # fmt: skip
