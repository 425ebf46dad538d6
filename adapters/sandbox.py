"""validate() in a child process: no environment of ours, no writing, bounded memory, CPU and wall time.

The request goes in by stdin, the answer comes back by stdout, both JSON. The child limits itself before it opens the
first file: what is hostile is the adapter, not this program.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

import msgspec

import adapters
from adapters.spec import (
    AdapterError,
    AdapterInvalid,
    AdapterMissing,
    AdapterSpec,
    AdapterTooLarge,
    AdapterUnsupported,
    BaseShape,
)
from adapters.validation import Limits, validate

_ROOT = Path(adapters.__file__).parent.parent
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


def _result(answer: _Answer) -> AdapterSpec:
    if answer.spec is not None:
        return answer.spec
    assert answer.error is not None
    kind, code, message, param = answer.error
    raise _ERRORS[kind](code, message, param)


def _limit(limits: Limits) -> None:
    for kind, bound in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (bound, bound))
    os.nice(5)  # streams that are being answered go first


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    _limit(request.limits)
    try:
        answer = _Answer(spec=validate(Path(request.directory), request.shape, request.limits))
    except AdapterError as error:
        answer = _Answer(error=(type(error).__name__, error.code, error.message, error.param))
    except MemoryError:
        answer = _Answer(
            error=("AdapterInvalid", "validation_limits", "checking took more memory than is allowed", None)
        )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
