// The one header in front of every kernel.
//
// Everything that is not plain C++ has a name here, so that the same .cu file compiles for a GPU
// (NVRTC or nvcc, below) and for the host simulator of the tests (hostsim.h has the same names).
// Kernels use no inline assembly, no __shared__, no memcpy and no library headers of their own.
//
//   KDEV                          a function on the device
//   SHARED(float, name, [8][32])  a static shared array;  DYN_SMEM(name) the dynamic one, as bytes
//   mma_m16n8k16, ldmatrix_x4, cp_async16 and friends    one PTX instruction each
//   bf16, half                    the element types, with to_float and from_float<T>
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define DYN_SMEM(name) extern __shared__ __align__(128) unsigned char name[]
#define SHARED(T, name, ...) __shared__ __align__(16) T name __VA_ARGS__
#define KDEV __device__ __forceinline__

KDEV unsigned smem_u32(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// d[16x8] += a[16x16] @ b[16x8], fp32 accumulation; fragments as in the PTX manual.
KDEV void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                       const __nv_bfloat16*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
KDEV void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                       const __half*) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit elements from shared memory; lane i gives row i % 8 of matrix i / 8.
KDEV void ldmatrix_x4(unsigned (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_u32(p))
               : "memory");
}
KDEV void ldmatrix_x4_trans(unsigned (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_u32(p))
               : "memory");
}

// An 8x8 matrix of 16-bit elements transposed: lane 4 * g + t gives and gets
// columns 2 * t and 2 * t + 1 of row g.
KDEV unsigned movmatrix_trans(unsigned row) {
  unsigned column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

// 16 bytes from global to shared memory; with pred false zeros, and src is not read.
KDEV void cp_async16(void* dst, const void* src, bool pred) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_u32(dst)), "l"(src),
               "r"(pred ? 16 : 0)
               : "memory");
}
KDEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
KDEV void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

KDEV float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#else
#include "hostsim.h"
#endif

typedef __nv_bfloat16 bf16;

#define NEG_INF __uint_as_float(0xff800000u)  // NVRTC has no <cmath>
#define FULL_MASK 0xffffffffu

struct __align__(16) Vec16 {
  unsigned u[4];  // 8 elements of 16 bits, or 16 of 8 bits, in one access
};

KDEV float bf16_low(unsigned u) { return __uint_as_float(u << 16); }
KDEV float bf16_high(unsigned u) { return __uint_as_float(u & 0xffff0000u); }

KDEV float to_float(float x) { return x; }
KDEV float to_float(bf16 x) { return __bfloat162float(x); }
KDEV float to_float(half x) { return __half2float(x); }

template <typename T>
KDEV T from_float(float x);
template <>
KDEV float from_float<float>(float x) { return x; }
template <>
KDEV bf16 from_float<bf16>(float x) { return __float2bfloat16(x); }
template <>
KDEV half from_float<half>(float x) { return __float2half(x); }

// Two elements in a register, the first in the low half; T is named by a null pointer.
KDEV unsigned pack2(float a, float b, const bf16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);  // one instruction
  return *reinterpret_cast<const unsigned*>(&pair);
}
KDEV unsigned pack2(float a, float b, const half*) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const unsigned*>(&pair);
}
KDEV void unpack2(float& a, float& b, unsigned u, const bf16*) {
  a = bf16_low(u);
  b = bf16_high(u);
}
KDEV void unpack2(float& a, float& b, unsigned u, const half*) {
  a = __half2float(__ushort_as_half((unsigned short)u));
  b = __half2float(__ushort_as_half((unsigned short)(u >> 16)));
}

// Where chunk `chunk` (8 elements of 16 bits) of row `row` lies in a shared tile of rows of COLUMNS
// (32 or 64) elements, in elements. Chunks are exchanged so that 8 rows' chunks of one column lie
// in all 32 banks, as do the chunks of a row: cp.async and ldmatrix meet no conflicts.
template <int COLUMNS>
KDEV int swizzled(int row, int chunk) {
  static_assert(COLUMNS == 32 || COLUMNS == 64, "rows of 64 or 128 bytes");
  constexpr int chunks = COLUMNS / 8, rows_shift = COLUMNS == 64 ? 0 : 1;
  return row * COLUMNS + 8 * (chunk ^ ((row >> rows_shift) & (chunks - 1)));
}
