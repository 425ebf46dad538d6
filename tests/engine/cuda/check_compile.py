"""Every kernel that Llamas of 1B, 8B and 70B launch compiles to machine code for every supported card, fits its shared
memory and spills no register. Needs no card. Run by test_cuda.py, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.model.config import ModelConfig
from engine.ops.cards import MEMORY_BYTES, make_card
from tests.conftest import IS_CI
from tests.engine.cuda.launches import KERNELS, Launch, launches_of
from tests.tiny import tiny_config

PROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
"""Multiprocessors of A100, A10, L40S, H100, B200, RTX PRO 6000, by compute capability."""

MODELS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "head_dim": 128},
}

CASES = [(model, arch) for model in MODELS for arch in PROCESSORS] if IS_CI else [("8B", 90)]


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes: bytes of shared memory, registers of a thread, bytes that it spills."""

    kernel: str
    shared: int
    registers: int
    spilled: int


def compiled(launch: Launch, arch: int) -> Compiled:
    """From Triton's cache, where it was compiled before."""
    kernel = next(each for each in KERNELS if each.__name__ == launch.kernel)
    hints = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(kernel, dict(launch.signature), dict(launch.constants), hints)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    usage = dict(field.split(":") for field in told.splitlines()[-1].split() if ":" in field)
    return Compiled(launch.kernel, made.metadata.shared, int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]))


def test_every_kernel_compiles_fits_and_spills_nothing() -> None:
    """For each card and model: all launches of decode and mixed steps. Prints what each kernel takes at most."""
    launches = {
        (model, arch): launches_of(
            ModelConfig.from_dict(tiny_config() | MODELS[model] | {"num_key_value_heads": 8, "vocab_size": 128256}),
            make_card(divmod(arch, 10), PROCESSORS[arch]),
        )
        for model, arch in CASES
    }
    jobs = list({(each.key, arch): (each, arch) for (_, arch), found in launches.items() for each in found}.values())
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("spawn")) as pool:
        made = pool.map(compiled, (launch for launch, _ in jobs), (arch for _, arch in jobs))
        results = {(launch.key, arch): each for (launch, arch), each in zip(jobs, made, strict=True)}
    print(f"\n{'model':6} {'card':6} {'kernel':22} {'variants':>8} {'shared':>8} {'registers':>9} {'spilled':>7}")
    faults = []
    for (model, arch), found in launches.items():
        limit = MEMORY_BYTES[divmod(arch, 10)]
        for name in sorted({each.kernel for each in found}):
            used = [results[each.key, arch] for each in found if each.kernel == name]
            shared, spilled = max(each.shared for each in used), max(each.spilled for each in used)
            registers = max(each.registers for each in used)
            print(f"{model:6} sm_{arch:<3} {name:22} {len(used):8} {shared:8} {registers:9} {spilled:7}")
            if shared > limit or spilled:
                faults.append((model, arch, name, shared, spilled))
    assert not faults
    assert {each.kernel for found in launches.values() for each in found} == {each.__name__ for each in KERNELS}
