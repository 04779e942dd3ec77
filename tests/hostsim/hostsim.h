// The host's half of gpu.cuh: CUDA's names for a kernel that is compiled with g++ and run by the
// simulator. Number types and their conversions are NVIDIA's own headers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>

#include "runtime.h"

// Code of the simulator inside the kernel's translation unit: its accesses are not the kernel's.
#define HOSTSIM_UNCHECKED __attribute__((noinline, no_sanitize("thread")))

// ---- language ---------------------------------------------------------------------------------

#define KDEV inline __attribute__((always_inline))
#undef __shared__
#define __shared__ use_the_SHARED_macro
#undef __launch_bounds__
#define __launch_bounds__(...)  // the loader reads it out of the text

#define DYN_SMEM(name) unsigned char* name = hostsim::dynamic_shared()
// GCC ignores section attributes inside templates, so the memory comes out of a call.
#define SHARED(T, name, ...)        \
  typedef T name##_type __VA_ARGS__; \
  static char name##_key;            \
  name##_type& name =                \
      *(name##_type*)hostsim::static_shared(&name##_key, sizeof(name##_type))

#define threadIdx (hostsim::thread_index())
#define blockIdx (hostsim::block_index())
#define blockDim (hostsim::block_dim())
#define gridDim (hostsim::grid_dim())
#define warpSize 32

// Makes kernel `name` callable through an array of pointers to its arguments.
#define HOSTSIM_EXPORT(name)                                                            \
  extern "C" __attribute__((visibility("default"))) void hostsim_invoke_##name(void** args) { \
    hostsim::Invoker<&name>::call(args);                                                \
  }

namespace hostsim {

template <auto Kernel>
struct Invoker;

template <class... Args, void (*Kernel)(Args...)>
struct Invoker<Kernel> {
  template <size_t... I>
  HOSTSIM_UNCHECKED static void unpack(void** args, std::index_sequence<I...>) {
    Kernel(*(std::remove_cv_t<Args>*)args[I]...);
  }
  static void call(void** args) { unpack(args, std::index_sequence_for<Args...>{}); }
};

template <class T>
HOSTSIM_UNCHECKED T slot(const Lanes& lanes, int lane) {
  static_assert(sizeof(T) <= kSlotBytes);
  T value;
  std::memcpy((void*)&value, lanes.slot[lane], sizeof value);
  return value;
}

template <class T>
HOSTSIM_UNCHECKED T shuffle(unsigned mask, T value, int source, const char* name, Site site) {
  const Lanes& lanes = exchange(mask, &value, sizeof value, name, site);
  if (!(lanes.mask >> source & 1))
    fail_at(site, "warp", "%s reads lane %d, which is not among %08x", name, source, lanes.mask);
  return slot<T>(lanes, source);
}

template <class T, class Op>
HOSTSIM_UNCHECKED T reduce(unsigned mask, T value, const char* name, Site site, Op op) {
  const Lanes& lanes = exchange(mask, &value, sizeof value, name, site);
  bool first = true;
  T result{};
  for (int i = 0; i < kWarpSize; ++i) {
    if (!(lanes.mask >> i & 1)) continue;
    const T other = slot<T>(lanes, i);
    result = first ? other : op(result, other);
    first = false;
  }
  return result;
}

// Fibers change places only in calls and checked accesses, so that this is one step; for the same
// reason `op` takes all its operands by value.
template <class T, class Op>
HOSTSIM_UNCHECKED T atomic_update(T* address, T value, Site site, Op op) {
  check_atomic(address, sizeof *address, site);
  const T old = *address;
  *address = op(old, value);
  return old;
}
template <class T>
HOSTSIM_UNCHECKED T atomic_compare_swap(T* address, T expected, T value, Site site) {
  check_atomic(address, sizeof *address, site);
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

}  // namespace hostsim

// ---- barriers and warps -----------------------------------------------------------------------

#define HOSTSIM_HERE hostsim::Site site = hostsim::Site::here()

inline void __syncthreads(HOSTSIM_HERE) { hostsim::block_barrier(false, "__syncthreads", site); }
inline int __syncthreads_count(int predicate, HOSTSIM_HERE) {
  return hostsim::block_barrier(predicate != 0, "__syncthreads_count", site);
}
inline int __syncthreads_or(int predicate, HOSTSIM_HERE) {
  return hostsim::block_barrier(predicate != 0, "__syncthreads_or", site) != 0;
}
inline int __syncthreads_and(int predicate, HOSTSIM_HERE) {
  return hostsim::block_barrier(predicate == 0, "__syncthreads_and", site) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HOSTSIM_HERE) {
  hostsim::warp_barrier(mask, site);
}
inline void __threadfence() { hostsim::memory_fence(); }
inline void __threadfence_block() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, HOSTSIM_HERE) {
  const int segment = hostsim::lane_index() & ~(width - 1);
  return hostsim::shuffle(mask, value, segment | (source & (width - 1)), "__shfl_sync", site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, HOSTSIM_HERE) {
  const int lane = hostsim::lane_index(), source = lane ^ lane_mask;
  const int last = lane | (width - 1);
  return hostsim::shuffle(mask, value, source > last ? lane : source, "__shfl_xor_sync", site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HOSTSIM_HERE) {
  const int lane = hostsim::lane_index();
  const bool inside = (lane & (width - 1)) + (int)delta < width;
  return hostsim::shuffle(mask, value, inside ? lane + (int)delta : lane, "__shfl_down_sync", site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HOSTSIM_HERE) {
  const int lane = hostsim::lane_index();
  const bool inside = (lane & (width - 1)) >= (int)delta;
  return hostsim::shuffle(mask, value, inside ? lane - (int)delta : lane, "__shfl_up_sync", site);
}

HOSTSIM_UNCHECKED inline unsigned __ballot_sync(unsigned mask, int predicate, HOSTSIM_HERE) {
  const unsigned bit = predicate ? 1u << hostsim::lane_index() : 0;
  return hostsim::reduce(mask, bit, "__ballot_sync", site,
                         [](unsigned a, unsigned b) { return a | b; });
}
HOSTSIM_UNCHECKED inline int __any_sync(unsigned mask, int predicate, HOSTSIM_HERE) {
  return hostsim::reduce(mask, predicate != 0, "__any_sync", site,
                         [](bool a, bool b) { return a || b; });
}
HOSTSIM_UNCHECKED inline int __all_sync(unsigned mask, int predicate, HOSTSIM_HERE) {
  return hostsim::reduce(mask, predicate != 0, "__all_sync", site,
                         [](bool a, bool b) { return a && b; });
}
template <class T>
HOSTSIM_UNCHECKED unsigned __match_any_sync(unsigned mask, T value, HOSTSIM_HERE) {
  const hostsim::Lanes& lanes =
      hostsim::exchange(mask, &value, sizeof value, "__match_any_sync", site);
  unsigned equal = 0;
  for (int i = 0; i < 32; ++i)
    if (lanes.mask >> i & 1 && hostsim::slot<T>(lanes, i) == value) equal |= 1u << i;
  return equal;
}

#define HOSTSIM_REDUCE(name, T, expression)                                            \
  inline T name(unsigned mask, T value, HOSTSIM_HERE) {                                \
    return hostsim::reduce(mask, value, #name, site, [](T a, T b) { return expression; }); \
  }
HOSTSIM_REDUCE(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
HOSTSIM_REDUCE(__reduce_add_sync, unsigned, a + b)
HOSTSIM_REDUCE(__reduce_min_sync, int, a < b ? a : b)
HOSTSIM_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
HOSTSIM_REDUCE(__reduce_max_sync, int, a > b ? a : b)
HOSTSIM_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
HOSTSIM_REDUCE(__reduce_or_sync, unsigned, a | b)
HOSTSIM_REDUCE(__reduce_and_sync, unsigned, a & b)
HOSTSIM_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

// ---- atomics ----------------------------------------------------------------------------------

#define HOSTSIM_ATOMIC(name, T, expression)                                 \
  inline T name(T* address, T operand, HOSTSIM_HERE) {                      \
    return hostsim::atomic_update(address, operand, site,                   \
                                  [](T old, T value) -> T { return expression; }); \
  }
HOSTSIM_ATOMIC(atomicAdd, float, old + value)
HOSTSIM_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)value))
HOSTSIM_ATOMIC(atomicAdd, unsigned, old + value)
HOSTSIM_ATOMIC(atomicAdd, unsigned long long, old + value)
HOSTSIM_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)value))
HOSTSIM_ATOMIC(atomicSub, unsigned, old - value)
HOSTSIM_ATOMIC(atomicMin, int, value < old ? value : old)
HOSTSIM_ATOMIC(atomicMin, unsigned, value < old ? value : old)
HOSTSIM_ATOMIC(atomicMin, unsigned long long, value < old ? value : old)
HOSTSIM_ATOMIC(atomicMax, int, value > old ? value : old)
HOSTSIM_ATOMIC(atomicMax, unsigned, value > old ? value : old)
HOSTSIM_ATOMIC(atomicMax, unsigned long long, value > old ? value : old)
HOSTSIM_ATOMIC(atomicOr, unsigned, old | value)
HOSTSIM_ATOMIC(atomicAnd, unsigned, old & value)
HOSTSIM_ATOMIC(atomicXor, unsigned, old ^ value)
HOSTSIM_ATOMIC(atomicExch, int, value)
HOSTSIM_ATOMIC(atomicExch, unsigned, value)
HOSTSIM_ATOMIC(atomicExch, float, value)
HOSTSIM_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)

template <class T>
T atomicCAS(T* address, T expected, T value, HOSTSIM_HERE) {
  return hostsim::atomic_compare_swap(address, expected, value, site);
}

// ---- loads, bits, mathematics -----------------------------------------------------------------

template <class T>
KDEV T __ldg(const T* p) { return *p; }
template <class T>
KDEV T __ldcg(const T* p) { return *p; }
template <class T>
KDEV T __ldcs(const T* p) { return *p; }
template <class T>
KDEV void __stcg(T* p, T value) { *p = value; }
template <class T>
KDEV void __stcs(T* p, T value) { *p = value; }

KDEV float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
KDEV unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
KDEV float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
KDEV int __float_as_int(float f) { return (int)__float_as_uint(f); }

KDEV int __popc(unsigned x) { return __builtin_popcount(x); }
KDEV int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
KDEV int __ffs(int x) { return __builtin_ffs(x); }
KDEV int __ffsll(long long x) { return __builtin_ffsll(x); }
KDEV int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
KDEV int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
KDEV unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= (unsigned)(bytes >> (selectors >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return result;
}
KDEV unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
KDEV int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
KDEV unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
KDEV unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}

namespace hostsim {

// CUDA's min and max of floats pass over NaN, as fmin does.
template <class A, class B>
KDEV auto minimum(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmin((C)a, (C)b);
  else return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B>
KDEV auto maximum(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return std::fmax((C)a, (C)b);
  else return (C)a > (C)b ? (C)a : (C)b;
}

KDEV float exp_approx(float x) { return std::exp(x); }
KDEV float log_approx(float x) { return std::log(x); }
KDEV float log2_approx(float x) { return std::log2(x); }
KDEV float sin_approx(float x) { return std::sin(x); }
KDEV float cos_approx(float x) { return std::cos(x); }
KDEV float divide(float a, float b) { return a / b; }
KDEV float reciprocal(float x) { return 1.0f / x; }
KDEV float reciprocal_root(float x) { return 1.0f / std::sqrt(x); }
KDEV float root(float x) { return std::sqrt(x); }
KDEV float add(float a, float b) { return a + b; }
KDEV float subtract(float a, float b) { return a - b; }
KDEV float multiply(float a, float b) { return a * b; }
KDEV float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
KDEV float from_integer(long long x) { return (float)x; }

// Conversions saturate on a GPU, and NaN becomes 0; the bounds are exact as double.
template <class I>
KDEV I saturated(double rounded, double low, double high) {
  if (std::isnan(rounded)) return 0;
  return rounded <= low ? (I)low : rounded >= high ? (I)high : (I)rounded;
}
KDEV int to_int(double rounded) { return saturated<int>(rounded, -2147483648.0, 2147483647.0); }
KDEV unsigned to_unsigned(double rounded) {
  return saturated<unsigned>(rounded, 0.0, 4294967295.0);
}
KDEV int int_nearest(float x) { return to_int(std::nearbyint(x)); }
KDEV int int_down(float x) { return to_int(std::floor(x)); }
KDEV int int_up(float x) { return to_int(std::ceil(x)); }
KDEV int int_to_zero(float x) { return to_int(std::trunc(x)); }
KDEV unsigned unsigned_nearest(float x) { return to_unsigned(std::nearbyint(x)); }
KDEV unsigned unsigned_to_zero(float x) { return to_unsigned(std::trunc(x)); }

}  // namespace hostsim

using std::isfinite;
using std::isinf;
using std::isnan;

// Names that some C library declares or may declare one day, so that functions would clash.
#define min hostsim::minimum
#define max hostsim::maximum
#define rsqrtf hostsim::reciprocal_root
#define __expf hostsim::exp_approx
#define __logf hostsim::log_approx
#define __log2f hostsim::log2_approx
#define __sinf hostsim::sin_approx
#define __cosf hostsim::cos_approx
#define __fdividef hostsim::divide
#define __fdiv_rn hostsim::divide
#define __frcp_rn hostsim::reciprocal
#define __frsqrt_rn hostsim::reciprocal_root
#define __fsqrt_rn hostsim::root
#define __fadd_rn hostsim::add
#define __fsub_rn hostsim::subtract
#define __fmul_rn hostsim::multiply
#define __fmaf_rn hostsim::multiply_add
#define __int2float_rn hostsim::from_integer
#define __uint2float_rn hostsim::from_integer
#define __ll2float_rn hostsim::from_integer
#define __float2int_rn hostsim::int_nearest
#define __float2int_rd hostsim::int_down
#define __float2int_ru hostsim::int_up
#define __float2int_rz hostsim::int_to_zero
#define __float2uint_rn hostsim::unsigned_nearest
#define __float2uint_rz hostsim::unsigned_to_zero

// ---- the wrappers of gpu.cuh ------------------------------------------------------------------

KDEV float ex2(float x) { return std::exp2(x); }

namespace hostsim {

struct Fragments {
  unsigned a[4], b[2];
};

KDEV float element(unsigned pair, int high, const __nv_bfloat16*) {
  return __uint_as_float(high ? pair & 0xffff0000u : pair << 16);
}
KDEV float element(unsigned pair, int high, const __half*) {
  __half_raw raw;
  raw.x = (unsigned short)(pair >> (16 * high));
  return __half2float(__half(raw));
}

// Lane 4 * g + t holds A[g or g + 8][2 t, 2 t + 1, and + 8], B[2 t, 2 t + 1, and + 8][g], and
// D[g or g + 8][2 t, 2 t + 1]: "Matrix Fragments for mma.m16n8k16" in the PTX manual.
template <class T>
HOSTSIM_UNCHECKED void multiply_fragments(float (&d)[4], const unsigned (&a)[4],
                                          const unsigned (&b)[2], const T* type, Site site) {
  Fragments mine;
  std::memcpy(mine.a, a, sizeof mine.a);
  std::memcpy(mine.b, b, sizeof mine.b);
  const Lanes& lanes = exchange(0xffffffffu, &mine, sizeof mine, "mma_m16n8k16", site);
  const int row = lane_index() >> 2, pair = lane_index() & 3;
  for (int e = 0; e < 4; ++e) {
    const int lower = e >> 1, column = pair * 2 + (e & 1);
    float sum = d[e];
    for (int t = 0; t < 4; ++t) {
      const Fragments& left = *(const Fragments*)lanes.slot[row * 4 + t];
      const Fragments& right = *(const Fragments*)lanes.slot[column * 4 + t];
      for (int half = 0; half < 2; ++half)
        for (int high = 0; high < 2; ++high)
          sum += element(left.a[lower + 2 * half], high, type) *
                 element(right.b[half], high, type);
    }
    d[e] = sum;
  }
}

// The rows are read before the lanes meet: none may write them until the next barrier.
HOSTSIM_UNCHECKED inline void load_matrices(unsigned (&r)[4], const void* row, bool transposed,
                                            Site site) {
  check_shared_row(row, site);
  const Lanes& lanes = exchange(0xffffffffu, row, 16, "ldmatrix", site);
  const int lane = lane_index();
  for (int i = 0; i < 4; ++i) {
    if (!transposed) {
      std::memcpy(&r[i], lanes.slot[i * 8 + lane / 4] + (lane & 3) * 4, 4);
      continue;
    }
    uint16_t low, high;
    std::memcpy(&low, lanes.slot[i * 8 + (lane & 3) * 2] + lane / 4 * 2, 2);
    std::memcpy(&high, lanes.slot[i * 8 + (lane & 3) * 2 + 1] + lane / 4 * 2, 2);
    r[i] = low | (unsigned)high << 16;
  }
}

}  // namespace hostsim

KDEV void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                       const __nv_bfloat16* type, HOSTSIM_HERE) {
  hostsim::multiply_fragments(d, a, b, type, site);
}
KDEV void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                       const __half* type, HOSTSIM_HERE) {
  hostsim::multiply_fragments(d, a, b, type, site);
}
KDEV void ldmatrix_x4(unsigned (&r)[4], const void* p, HOSTSIM_HERE) {
  hostsim::load_matrices(r, p, false, site);
}
KDEV void ldmatrix_x4_trans(unsigned (&r)[4], const void* p, HOSTSIM_HERE) {
  hostsim::load_matrices(r, p, true, site);
}
HOSTSIM_UNCHECKED inline unsigned movmatrix_trans(unsigned row, HOSTSIM_HERE) {
  const hostsim::Lanes& lanes =
      hostsim::exchange(0xffffffffu, &row, sizeof row, "movmatrix", site);
  const int column = hostsim::lane_index() >> 2, pair = hostsim::lane_index() & 3;
  uint16_t low, high;
  std::memcpy(&low, lanes.slot[8 * pair + column / 2] + column % 2 * 2, 2);
  std::memcpy(&high, lanes.slot[8 * pair + 4 + column / 2] + column % 2 * 2, 2);
  return low | (unsigned)high << 16;
}
KDEV void cp_async16(void* dst, const void* src, bool pred, HOSTSIM_HERE) {
  hostsim::copy_async16(dst, src, pred, site);
}
KDEV void cp_async_commit() { hostsim::copy_commit(); }
template <int N>
KDEV void cp_async_wait() {
  hostsim::copy_wait(N);
}
