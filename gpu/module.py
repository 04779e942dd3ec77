"""Kernels as values: a declaration in Python, an instance of it, and who compiles it.

A `.cu` file holds device function templates. A KernelDeclaration names one and its C parameters;
`instantiate` writes the `extern "C" __global__` function around it, whose name tells the
parameters (`paged_decode_bf16_h128_g8`), which is what profilers show. A Loader compiles
source text: CuPy's NVRTC on a GPU (`gpu/cupy_loader.py`), or a simulator on the host, which is how
the tests run the same files without one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np

KERNEL_PACKAGE = "rawpaged.gpu.kernels"

_SCALARS = {"int": np.int32, "long long": np.int64, "float": np.float32, "unsigned": np.uint32}


class Function(Protocol):
    """A compiled kernel; arguments are device arrays and NumPy scalars of the exact C types."""

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None: ...


class Loader(Protocol):
    """Compiles source text in which `gpu.cuh` and the other headers of `kernels/` are found."""

    def load(
        self, source: str, names: Sequence[str], *, max_shared_mem: Mapping[str, int]
    ) -> dict[str, Function]:
        """The `extern "C"` kernels of `source` by name."""
        ...


@dataclass(frozen=True, slots=True)
class Parameter:
    """One C parameter of a kernel."""

    c_type: str
    name: str

    @property
    def is_pointer(self) -> bool:
        return "*" in self.c_type

    @property
    def is_written(self) -> bool:
        return self.is_pointer and not self.c_type.startswith("const ")


@dataclass(frozen=True, slots=True)
class KernelDeclaration:
    """A device function template and the parameters that its kernels take.

    `parameters` is C text, such as "const T* q, T* out, int num_heads, float scale"; names of
    template type parameters in it are replaced by `instantiate`.
    """

    source: str
    """File in gpu/kernels."""
    function: str
    parameters: str

    def parse(self) -> tuple[Parameter, ...]:
        parsed = []
        for text in self.parameters.split(","):
            match = re.fullmatch(r"\s*(.+?)\s*(\w+)\s*", text, re.DOTALL)
            assert match is not None, f"{text!r} is no C parameter"
            parsed.append(Parameter(re.sub(r"\s*\*", "*", match[1]).strip(), match[2]))
        return tuple(parsed)


@dataclass(frozen=True, slots=True)
class Instance:
    """One kernel: its stable name and the text that defines it."""

    name: str
    declaration: KernelDeclaration
    parameters: tuple[Parameter, ...]
    definition: str
    max_shared_mem: int


def instantiate(
    declaration: KernelDeclaration,
    name: str,
    template_args: Sequence[str | int],
    *,
    types: Mapping[str, str] | None = None,
    threads: int,
    min_blocks: int = 1,
    max_shared_mem: int = 0,
) -> Instance:
    """The kernel `name` that runs `function<template_args>` with at most `threads` a block.

    `types` maps type names of the declaration (T) to C types (bf16).
    """
    parameters = tuple(
        Parameter(_replace_types(parameter.c_type, types or {}), parameter.name)
        for parameter in declaration.parse()
    )
    for parameter in parameters:
        assert parameter.is_pointer or parameter.c_type in _SCALARS, parameter
    signature = ", ".join(
        f"{p.c_type.replace('*', '* __restrict__')} {p.name}" for p in parameters
    )
    call = ", ".join(parameter.name for parameter in parameters)
    arguments = ", ".join(str(argument) for argument in template_args)
    definition = (
        f'extern "C" __global__ void __launch_bounds__({threads}, {min_blocks}) {name}'
        f"({signature}) {{\n  {declaration.function}<{arguments}>({call});\n}}\n"
    )
    return Instance(name, declaration, parameters, definition, max_shared_mem)


class Kernel:
    """A compiled instance that converts scalars by its signature and checks what it can.

    CuPy would pass a Python int as int64 and a float as double without a word.
    """

    def __init__(self, instance: Instance, function: Function) -> None:
        self.instance = instance
        self._function = function

    @property
    def name(self) -> str:
        return self.instance.name

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], *args: Any, shared_mem: int = 0
    ) -> None:
        parameters = self.instance.parameters
        if len(args) != len(parameters):
            raise TypeError(f"{self.name} takes {len(parameters)} arguments, not {len(args)}")
        if shared_mem > max(self.instance.max_shared_mem, 48 * 1024):
            raise ValueError(f"{self.name}: {shared_mem=} is more than was declared")
        converted = tuple(
            _convert(self.name, parameter, arg)
            for parameter, arg in zip(parameters, args, strict=True)
        )
        self._function(grid, block, converted, shared_mem=shared_mem)


def load_kernels(loader: Loader, instances: Sequence[Instance]) -> dict[str, Kernel]:
    """Compile instances of one source file together; kernels by name."""
    sources = {instance.declaration.source for instance in instances}
    assert len(sources) == 1, f"one source at a time, not {sources}"
    text = source_text(sources.pop(), instances)
    functions = loader.load(
        text,
        [instance.name for instance in instances],
        max_shared_mem={instance.name: instance.max_shared_mem for instance in instances},
    )
    return {instance.name: Kernel(instance, functions[instance.name]) for instance in instances}


def source_text(source: str, instances: Sequence[Instance]) -> str:
    """A translation unit: the file under its own name, for profilers and messages; its kernels."""
    body = resources.files(KERNEL_PACKAGE).joinpath(source).read_text(encoding="utf-8")
    definitions = "\n".join(instance.definition for instance in instances)
    return f'#line 1 "{source}"\n{body}\n{definitions}'


def _replace_types(c_type: str, types: Mapping[str, str]) -> str:
    for name, replacement in types.items():
        c_type = re.sub(rf"\b{name}\b", replacement, c_type)
    return c_type


def _convert(kernel: str, parameter: Parameter, arg: Any) -> Any:
    is_array = hasattr(arg, "__cuda_array_interface__") or hasattr(arg, "__array_interface__")
    if parameter.is_pointer:
        if not is_array or np.ndim(arg) == 0:
            raise TypeError(f"{kernel}: {parameter.name} must be an array, not {arg!r}")
        return arg
    scalar = _SCALARS[parameter.c_type]
    converted = scalar(arg)
    if converted != arg and not isinstance(converted, np.float32):
        raise OverflowError(f"{kernel}: {parameter.name}={arg} is no {parameter.c_type}")
    return converted
