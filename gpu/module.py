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
from functools import partial
from importlib import resources
from typing import Any, Protocol

from rawpaged.gpu.arguments import SCALAR_TYPES, as_array, scalar_converter
from rawpaged.gpu.launch import Function as Function
from rawpaged.gpu.launch import Launch, Operand

KERNEL_PACKAGE = "rawpaged.gpu.kernels"

PLAIN_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory above this has to be asked for, kernel by kernel."""


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
        assert parameter.is_pointer or parameter.c_type in SCALAR_TYPES, parameter
    signature = ", ".join(f"{p.c_type.replace('*', '* __restrict__')} {p.name}" for p in parameters)
    call = ", ".join(parameter.name for parameter in parameters)
    arguments = ", ".join(str(argument) for argument in template_args)
    definition = (
        f'extern "C" __global__ void __launch_bounds__({threads}, {min_blocks}) {name}'
        f"({signature}) {{\n  {declaration.function}<{arguments}>({call});\n}}\n"
    )
    return Instance(name, declaration, parameters, definition, max_shared_mem)


class Kernel:
    """A compiled instance that converts scalars by its signature and checks what it can.

    What follows from the signature is worked out here once: a step makes hundreds of launches.
    """

    def __init__(self, instance: Instance, function: Function) -> None:
        self.instance = instance
        self._function = function
        names = [f"{instance.name}: {parameter.name}" for parameter in instance.parameters]
        self._converters = tuple(
            partial(as_array, name)
            if parameter.is_pointer
            else scalar_converter(parameter.c_type, name)
            for name, parameter in zip(names, instance.parameters, strict=True)
        )
        self._most_shared_mem = max(instance.max_shared_mem, PLAIN_SHARED_BYTES)

    @property
    def name(self) -> str:
        return self.instance.name

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], *args: Any, shared_mem: int = 0
    ) -> None:
        """Launch; the function gets arrays as they are and scalars of the exact C types.

        Raises TypeError for a wrong number of arguments and for what is no array where one is
        due, OverflowError for a number that the parameter's type does not hold, ValueError for
        more shared memory than was declared.
        """
        self._check_call(args, shared_mem)
        converted = [convert(arg) for convert, arg in zip(self._converters, args, strict=True)]
        self._function(grid, block, tuple(converted), shared_mem=shared_mem)

    def prepare(
        self, grid: tuple[int, ...], block: tuple[int, ...], *args: Any, shared_mem: int = 0
    ) -> Launch:
        """A launch over arrays to come, with an Operand for each of them; raises as a call does."""
        self._check_call(args, shared_mem)
        converted: list[Any] = []
        places = []
        for parameter, convert, arg in zip(
            self.instance.parameters, self._converters, args, strict=True
        ):
            if isinstance(arg, Operand) and parameter.is_pointer:
                places.append((len(converted), arg.index))
                converted.append(None)
            elif parameter.is_pointer:
                raise TypeError(f"{self.name}: {parameter.name} must be an Operand, not {arg!r}")
            else:
                converted.append(convert(arg))
        return Launch(
            self.name, self._function, grid, block, tuple(converted), tuple(places), shared_mem
        )

    def _check_call(self, args: tuple[Any, ...], shared_mem: int) -> None:
        if len(args) != len(self._converters):
            raise TypeError(f"{self.name} takes {len(self._converters)} arguments, not {len(args)}")
        if shared_mem > self._most_shared_mem:
            raise ValueError(f"{self.name}: {shared_mem=} is more than was declared")


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
