"""Compiles every CPU kernel for a 64-bit ARM processor, on a machine that is none.

    python -m tests.cpu.arm_child OUT GGUF GGUF

Engines over the tiny checkpoint in float32, and over both GGUF files, whose weights stay in blocks,
with an FP8 and with a bfloat16 cache, go through all that a first request needs. Kernels are
compiled as they are asked for, but none runs. OUT gets a line for each: its name, bytes of machine
code, fused vector multiplications, functions called.
"""

from __future__ import annotations

import platform
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

platform.machine = lambda: "aarch64"  # before anything asks

import llvmlite.binding as llvm  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402

from rawpaged.cpu import compiling, threads  # noqa: E402
from rawpaged.engine.warm_up import warm_up  # noqa: E402
from tests.engine.helpers import tiny_engine  # noqa: E402

TRIPLE, PROCESSOR = "aarch64-unknown-linux-gnu", "neoverse-n1"
_ELF_AARCH64 = 183
_KERNEL = re.compile(r".*\d(?P<name>[a-z]\w*)_[0-9a-f]{16}B")
_ADDRESS = 8
"""Of every function; nothing calls it."""


class Emitter:
    """Stands for Numba's execution engine: makes object code of entries, and leaves it at that."""

    def __init__(self, machine: Any) -> None:
        self.lines: list[str] = []
        self._machine = machine
        self._modules: list[Any] = []

    def add_module(self, module: Any) -> None:
        self._modules.append(module)

    def is_symbol_defined(self, name: str) -> bool:
        if not name.startswith("cfunc."):
            return False
        module = self._modules[-1]
        text = str(module)
        assert "llvm.x86" not in text, f"{name} has instructions of x86"
        assert "module asm" not in text
        assert " asm " not in text
        code = self._machine.emit_object(module)
        assert code[:4] == b"\x7fELF"
        assert struct.unpack_from("<H", code, 18) == (_ELF_AARCH64,)
        assembly = self._machine.emit_assembly(module)
        fused = len(re.findall(r"\tfml[as]\tv\d+\.4s", assembly))
        calls = set(re.findall(r"\tbl?\t([a-zA-Z]\w*)", assembly))
        kernel = _KERNEL.match(name)
        assert kernel is not None, name
        self.lines.append(f"{kernel['name']} {len(code)} {fused} {','.join(sorted(calls))}")
        return True

    def get_function_address(self, name: str) -> int:
        return _ADDRESS

    def finalize_object(self) -> None:
        pass

    def add_global_mapping(self, value: Any, address: int) -> None:
        pass


def turn_to_arm() -> Emitter:
    """Let Numba's CPU target make code for PROCESSOR, from here on."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    codegen: Any = cpu_target.target_context.codegen()
    target = llvm.Target.from_triple(TRIPLE)
    machine = target.create_target_machine(cpu=PROCESSOR, opt=1, reloc="pic", codemodel="default")
    llvm.get_process_triple = lambda: TRIPLE
    emitter = Emitter(machine)
    codegen._tm, codegen._engine = machine, emitter
    codegen._target_data = machine.target_data
    codegen._data_layout = str(machine.target_data)
    codegen.set_env = lambda name, environment: None
    return emitter


def no_cache(*args: Any) -> Any:
    raise RuntimeError("code for another processor is not kept")


def compile_only(entries: Callable[[], Any]) -> Callable[[], Any]:
    def compiled() -> Any:
        entries()
        return (lambda *args: None,) * 3

    return compiled


def main(out: str, *paths: str) -> None:
    emitter = turn_to_arm()
    patched: Any = compiling
    patched._EntryCache = no_cache
    team: Any = threads
    team._entries = compile_only(team._entries)
    models = [("float32", "llama"), *(("bfloat16", path) for path in paths)]
    for (dtype, model), kv_cache_dtype in zip(models, (None, "fp8_e4m3", None), strict=True):
        engine = tiny_engine(
            model,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            keep_quantized=Path(model).is_absolute(),
        )
        warm_up(engine.runner)
    Path(out).write_text("".join(f"{line}\n" for line in emitter.lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
