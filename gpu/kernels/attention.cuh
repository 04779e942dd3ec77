// What the attention kernels share: elements of a paged cache, a lane's share of a row, scores.
//
// Cache of a layer: keys and values each C[num_blocks, num_kv_heads, block_size, HD]. C is T, or
// one byte (e4m3, int8) with a float32 scale by KV head. Bytes become elements of T exactly; the
// scale of the keys goes into the scores' factor and the values' into the output.
#pragma once
#include "gpu.cuh"

typedef unsigned char e4m3;
typedef signed char int8;

#define LOG2_E 1.4426950408889634f

// Two e4m3 numbers, the first in the low byte of `pair`, as two halves. Exact; NaN stays NaN.
KDEV unsigned halves_of_e4m3(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const __half2_raw wide =
      __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(pair & 0xffffu), __NV_E4M3);
  return *reinterpret_cast<const unsigned*>(&wide);
#else
  // Without an instruction for it: e4m3's exponent and mantissa are those of a half that is 2^8 too
  // small, subnormals included; 0x7f, NaN, gets the bit that makes the half's exponent all ones.
  const unsigned spread = __byte_perm(pair, 0, 0x4140), low = spread & 0x007f007fu;
  const unsigned nan = (low + 0x00010001u) & 0x00800080u;
  const unsigned bits = (spread & 0x00800080u) << 8 | (low | nan) << 7;
  const __half2 factor = __floats2half2_rn(256.f, 256.f);
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&bits), factor);
  return *reinterpret_cast<const unsigned*>(&product);
#endif
}

// Two bytes of a cache, the first in the low byte of `pair`, as two elements of T.
template <typename T>
KDEV unsigned widen2(unsigned pair, const e4m3*) {
  float first, second;  // for half too: without, ptxas spills a register for sm_100
  unpack2(first, second, halves_of_e4m3(pair), (const half*)0);
  return pack2(first, second, (const T*)0);
}
template <typename T>
KDEV unsigned widen2(unsigned pair, const int8*) {
  // 2^23 + (x + 128) has x + 128 in its low byte; int-to-float conversions are slower.
  const unsigned biased = pair ^ 0x8080u;
  return pack2(__uint_as_float(0x4b000000u | (biased & 0xffu)) - 8388736.f,
               __uint_as_float(0x4b000000u | ((biased >> 8) & 0xffu)) - 8388736.f, (const T*)0);
}

// The first of a token's HD elements in a cache.
template <int HD>
KDEV long long row_of(int block_id, int token, int head, int num_kv_heads, int block_shift) {
  const long long rows = ((long long)block_id * num_kv_heads + head) << block_shift;
  return (rows + (token & ((1 << block_shift) - 1))) * HD;
}

// BYTES (2, 4, 8 or 16) from an address that is a multiple of them; the rest of a word is zero.
template <int BYTES>
KDEV void load_words(unsigned* words, const void* from) {
  if constexpr (BYTES == 16) {
    const Vec16 v = *(const Vec16*)from;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = v.u[i];
  } else if constexpr (BYTES == 8) {
    const uint2 v = *(const uint2*)from;
    words[0] = v.x;
    words[1] = v.y;
  } else if constexpr (BYTES == 4) {
    words[0] = *(const unsigned*)from;
  } else {
    static_assert(BYTES == 2, "an access of 2, 4, 8 or 16 bytes");
    words[0] = *(const unsigned short*)from;
  }
}

// How LANES lanes share a row of HD elements: WIDE side by side each (16 bytes where the row is
// long enough), that FULL times, then REST_WIDE each.
template <typename C, int HD, int LANES>
struct LaneShare {
  static constexpr int MOST = 16 / sizeof(C);
  static constexpr int LEFT = HD % (LANES * MOST);
  static constexpr int WIDE = LEFT == 0 || LEFT == 16 || LEFT == 32 ? MOST : 8;
  static constexpr int CHUNK = LANES * WIDE, FULL = HD / CHUNK, REST = HD % CHUNK;
  static constexpr int REST_WIDE = REST / LANES;
  static constexpr int WIDE_WORDS = WIDE * sizeof(C) / 4;
  static constexpr int WORDS = FULL * WIDE_WORDS + (REST_WIDE * sizeof(C) + 3) / 4;
  static_assert(REST == 0 || REST == 16 || REST == 32, "head size not supported");

  // Which element of the row is a lane's e-th, and the other way round.
  KDEV static int dim(int e, int lane) {
    return e < FULL * WIDE ? e / WIDE * CHUNK + lane * WIDE + e % WIDE
                           : FULL * CHUNK + lane * REST_WIDE + e - FULL * WIDE;
  }
  KDEV static int lane_of(int dim) {
    if constexpr (REST != 0)
      if (dim >= FULL * CHUNK) return (dim - FULL * CHUNK) / REST_WIDE;
    return dim % CHUNK / WIDE;
  }
  KDEV static int element_of(int dim) {
    if constexpr (REST != 0)
      if (dim >= FULL * CHUNK) return FULL * WIDE + (dim - FULL * CHUNK) % REST_WIDE;
    return dim / CHUNK * WIDE + dim % WIDE;
  }

  // Zeros unless `visible`; then `row` is not read.
  KDEV static void load(unsigned (&words)[WORDS], const C* row, int lane, bool visible) {
    if (!visible) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = 0;
      return;
    }
#pragma unroll
    for (int i = 0; i < FULL; ++i)
      load_words<WIDE * sizeof(C)>(words + i * WIDE_WORDS, row + i * CHUNK + lane * WIDE);
    if constexpr (REST != 0)
      load_words<REST_WIDE * sizeof(C)>(words + FULL * WIDE_WORDS,
                                        row + FULL * CHUNK + lane * REST_WIDE);
  }
};

// Dot products to exponents of two: log2(e) * scale * dot, or with cap > 0
// log2(e) * cap * tanh(scale * dot / cap).
struct ScoreMap {
  float inner, outer;
};
KDEV ScoreMap score_map(float scale, float cap) {
  if (cap > 0.f) return {2.f * LOG2_E * scale / cap, LOG2_E * cap};
  return {LOG2_E * scale, 0.f};
}
KDEV float exponent_of(float dot, ScoreMap map) {
  const float x = dot * map.inner;
  if (map.outer == 0.f) return x;
  return map.outer * (1.f - __fdividef(2.f, 1.f + ex2(x)));  // tanh(y) = 1 - 2 / (1 + e^2y)
}

// First key that a query at `position` sees; window 0: all before it.
KDEV int first_visible(int position, int window) {
  return window > 0 ? max(0, position + 1 - window) : 0;
}

// A maximum to subtract: where no key was seen yet, 0, so that exp(-inf - top) is 0 and not NaN.
KDEV float finite_top(float top) { return top == NEG_INF ? 0.f : top; }

// What sum(exp2(x - top) * v) is multiplied by; a sink is a logit that has no value.
KDEV float normaliser(float top, float sum, bool has_sink, float sink) {
  if (!has_sink) return 1.f / sum;
  const float exponent = sink * LOG2_E, most = fmaxf(top, exponent);
  const float shrink = ex2(top - most);
  return shrink / (sum * shrink + ex2(exponent - most));
}
