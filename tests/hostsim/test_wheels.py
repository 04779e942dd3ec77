"""What is missing is named, with how to install it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.hostsim import wheels
from tests.hostsim.conftest import wheels_or_skip
from tests.hostsim.wheels import CudaWheels, MissingToolError, find_compiler, find_cuda_wheels


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose only package is an empty `nvidia`."""
    folder = tmp_path / "nvidia"
    folder.mkdir()
    monkeypatch.setattr(wheels, "_nvidia_folders", lambda: [folder])
    return folder


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_no_wheels_at_all(packages: Path) -> None:
    with pytest.raises(MissingToolError, match=r'pip install "rawpaged\[gpusim\]"'):
        find_cuda_wheels()


def test_a_missing_package_is_named(packages: Path) -> None:
    touch(packages / "cu13" / "include", "cuda_bf16.h", "cccl/cuda/std/version")
    with pytest.raises(MissingToolError, match=r"nvidia-cuda-crt: not installed"):
        find_cuda_wheels()


def test_the_newest_version_is_taken(packages: Path) -> None:
    headers = ("cuda_bf16.h", "crt/host_defines.h", "cccl/cuda/std/version")
    touch(packages / "cu13" / "include", *headers)
    touch(packages / "cu14" / "include", *headers)
    found = find_cuda_wheels()
    assert found.root == packages / "cu14"
    assert found.include == (packages / "cu14/include", packages / "cu14/include/cccl")
    with pytest.raises(MissingToolError, match="nvidia-cuda-cuobjdump"):
        found.tool("cuobjdump")


def test_compilers_that_are_absent_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingToolError, match="no-such-compiler is not installed; install g"):
        find_compiler()
    old = tmp_path / "g++-old"
    old.write_text("#!/bin/sh\necho 9.4.0\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(MissingToolError, match=r"version 9\.4\.0; install g\+\+ 10 or newer"):
        find_compiler()


def test_other_machines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(MissingToolError, match="x86_64, not on riscv64"):
        find_compiler()


def test_missing_tools_skip_tests_but_fail_them_under_ci(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="gpusim"):
        wheels_or_skip()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="gpusim"):
        wheels_or_skip()


@pytest.mark.gpusim
def test_tools_of_this_environment(cuda_wheels: CudaWheels) -> None:
    for name in ("cuobjdump", "nvdisasm"):
        assert cuda_wheels.tool(name).is_file()
