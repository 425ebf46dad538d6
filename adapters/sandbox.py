"""validate() in a child process: no environment of ours, bounded memory, CPU and wall time. It writes nothing, unless
the weights came in shards: these it joins first, into one file beside them.

The request goes in by stdin, the answer comes back by stdout, both JSON. The child limits itself before it opens the
first file: what is hostile is the adapter, not this program.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

import adapters
from adapters.header import open_regular
from adapters.shards import MAX_HEADER_BYTES, is_sharded, join
from adapters.spec import (
    AdapterError,
    AdapterInvalid,
    AdapterMissing,
    AdapterSpec,
    AdapterTooLarge,
    AdapterUnsupported,
    BaseShape,
)
from adapters.storage import WEIGHTS_FILE
from adapters.validation import Limits, check_content, inspect, with_new_tokens

_ROOT = Path(adapters.__file__).parent.parent
INSPECT_CPU_S = 5
SLOWEST_READ = 32 << 20
SLOWEST_CHECK = 128 << 20
"""Bytes per second: what a large adapter may take above the limits of a small one, of wall and of CPU time."""
_ERRORS = {kind.__name__: kind for kind in (AdapterInvalid, AdapterUnsupported, AdapterTooLarge, AdapterMissing)}


class _Request(msgspec.Struct):
    directory: str
    shape: BaseShape
    limits: Limits


class _Answer(msgspec.Struct):
    spec: AdapterSpec | None = None
    error: tuple[str, str, str, str | None] | None = None  # class, code, message, param


async def run(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """Raises AdapterError: what validate() raises, or AdapterInvalid when the child broke its limits."""
    limits = _for_size(limits, directory)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(_ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    request = msgspec.json.encode(_Request(str(directory), shape, limits))
    try:
        async with asyncio.timeout(limits.timeout_s):
            output, complaint = await child.communicate(request)
    except TimeoutError:
        raise AdapterInvalid("validation_limits", f"checking took longer than {limits.timeout_s:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        return _result(msgspec.json.decode(output, type=_Answer))
    if (child.returncode or 0) < 0:  # by a signal: SIGXCPU, or SIGKILL of the kernel's memory guard
        raise AdapterInvalid("validation_limits", "checking took more time or memory than is allowed")
    raise RuntimeError(f"the check of an adapter broke: {complaint.decode(errors='replace')[-2000:]}")


def _for_size(limits: Limits, directory: Path) -> Limits:
    size = sum(file.stat().st_size for file in directory.iterdir())
    timeout_s, cpu_s = limits.timeout_s + size / SLOWEST_READ, limits.cpu_s + size // SLOWEST_CHECK
    return replace(limits, timeout_s=timeout_s, cpu_s=cpu_s)


def _result(answer: _Answer) -> AdapterSpec:
    if answer.spec is not None:
        return answer.spec
    assert answer.error is not None
    kind, code, message, param = answer.error
    raise _ERRORS[kind](code, message, param)


def _limit(limits: Limits, file_bytes: int) -> None:
    for kind, bound in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (bound, bound))
    os.nice(5)  # streams that are being answered go first


def _validate(directory: Path, shape: BaseShape, limits: Limits) -> AdapterSpec:
    """As validate(). Config and header are small whatever the weights are: a pattern that never ends is not given the
    time that gigabytes of values may take, while others wait to be checked."""
    with open_regular(directory / WEIGHTS_FILE) as file:
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soon = math.ceil(time.process_time()) + INSPECT_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (min(soon, most), most))
        found = inspect(directory, file, shape, limits)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        check_content(file, found, shape)
    return with_new_tokens(directory, found.spec, shape)


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    directory, limits = Path(request.directory), request.limits
    has_shards = is_sharded(directory)
    _limit(limits, limits.max_bytes + MAX_HEADER_BYTES if has_shards else 0)
    try:
        if has_shards:
            join(directory)
        answer = _Answer(spec=_validate(directory, request.shape, limits))
    except AdapterError as error:
        answer = _Answer(error=(type(error).__name__, error.code, error.message, error.param))
    except MemoryError:
        answer = _Answer(
            error=("AdapterInvalid", "validation_limits", "checking took more memory than is allowed", None)
        )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
