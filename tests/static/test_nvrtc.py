"""Options, logs and listings are understood."""

from __future__ import annotations

import pytest

from rawpaged.gpu.attention import decode_instances
from rawpaged.gpu.cupy_loader import BASE_OPTIONS
from rawpaged.gpu.gather import instances
from rawpaged.gpu.module import source_text
from tests.hostsim.wheels import CudaWheels
from tests.static import nvrtc, sass

pytestmark = pytest.mark.gpusim

LOG = """ptxas info    : 80 bytes gmem
ptxas info    : Compiling entry function 'reduce' for 'sm_90a'
ptxas info    : Function properties for reduce
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 36 registers, used 1 barriers, 2064 bytes smem
ptxas info    : Compile time = 123.458 ms
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas warning : Registers are spilled to local memory in function 'decode'
ptxas info    : Function properties for decode
ptxas         .     8 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 160 registers, used 0 barriers
"""
LISTING = """
.text.copy_rows:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P1 LDG.E.64 R4, desc[UR4][R2.64+0x80] ;
        /*0030*/              @UP0 STG.E.128 desc[UR4][R8.64], R4 ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128.ZFILL [R1], desc[UR4][R2.64] ;
        /*0050*/                   LDGSTS.E.LTC128B [R1], desc[UR4][R2.64] ;
        /*0060*/                   LDGDEPBAR ;
.text.multiply:
        /*0000*/                   LDSM.16.MT88.4 R4, [R1] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   HFMA2.MMA R4, -RZ, RZ, 0, 0 ;
        /*0030*/                   STL.64 [R1], R4 ;
       /*10040*/              @P0  LDL R4, [R1] ;
"""


def test_usage_is_read_out_of_the_log() -> None:
    assert nvrtc.parse_usage(LOG) == {
        "reduce": nvrtc.Usage(registers=36, shared_bytes=2064, stack_bytes=0, spill_bytes=0),
        "decode": nvrtc.Usage(registers=160, shared_bytes=0, stack_bytes=8, spill_bytes=48),
    }
    (warning,) = nvrtc.parse_warnings(LOG)
    assert "spilled to local memory in function 'decode'" in warning


def test_instructions_are_counted_by_function() -> None:
    assert sass.count_instructions(LISTING) == {
        "copy_rows": {sass.LOAD_16: 1, sass.STORE_16: 1, sass.COPY_16: 1},
        "multiply": {sass.LOAD_MATRIX: 1, sass.TENSOR: 1, sass.LOCAL: 2},
    }


def test_options_are_the_loaders(cuda_wheels: CudaWheels) -> None:
    given = nvrtc.options("sm_90a")
    assert given[: len(BASE_OPTIONS)] == BASE_OPTIONS
    assert "-arch=sm_90a" in given


def test_lines_of_the_source_are_in_the_binary(cuda_wheels: CudaWheels) -> None:
    """-lineinfo and #line: profilers show lines of the .cu file by its name."""
    text = source_text("gather_rows.cu", list(instances().values()))
    cubin = nvrtc.compile_text(text, "sm_90a").cubin
    assert b".debug_line" in cubin
    assert b"gather_rows.cu" in cubin


def test_what_does_not_compile_is_reported_with_its_line(cuda_wheels: CudaWheels) -> None:
    with pytest.raises(nvrtc.CompileError, match=r'wrong\.cu\(3\).*"no_type" is undefined'):
        nvrtc.compile_text('#line 3 "wrong.cu"\nno_type x;\n', "sm_80")


def test_unknown_architectures_are_refused(cuda_wheels: CudaWheels) -> None:
    with pytest.raises(nvrtc.CompileError, match="INVALID_OPTION"):
        nvrtc.compile_text("", "sm_10")


@pytest.mark.parametrize("pair", [("sm_90", "sm_90a"), ("sm_100", "sm_100a")])
def test_plain_architectures_give_the_same_code(
    pair: tuple[str, str], cuda_wheels: CudaWheels
) -> None:
    """CuPy asks for the plain one; what is measured for the other holds for it."""
    text = source_text("paged_decode.cu", decode_instances("bfloat16", "bfloat16", 64, 4))
    plain, special = (nvrtc.compile_text(text, arch) for arch in pair)
    assert plain.usage == special.usage
    listings = [sass.disassemble(one.cubin, cuda_wheels) for one in (plain, special)]
    assert sass.count_instructions(listings[0]) == sass.count_instructions(listings[1])
