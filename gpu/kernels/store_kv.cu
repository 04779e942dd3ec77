// Writes the keys and values of new tokens to their slots of a paged cache.
//
// keys, values  T[num_tokens, num_kv_heads, HD], rows key_stride and value_stride elements apart
// slots         i64[num_tokens], block_id * block_size + offset; a negative slot is left out
// cache_*       C[num_blocks, num_kv_heads, block_size, HD], block_size = 1 << block_shift
// *_scale       f32[num_kv_heads], for a C of one byte: stored = x / scale, rounded to nearest even
//               and clamped to the type's finite range (e4m3 448, int8 127)
//
// A thread: 8 elements of a key and of a value, 16 bytes read and 16 or 8 written for each.
// Grid: ceil(num_tokens * num_kv_heads * HD / 8 / 256), 256 threads.
// Bytes: HD * (2 * sizeof(T) + 2 * sizeof(C)) a token and KV head. Expected: below 40 registers.
#include "attention.cuh"

KDEV unsigned quantise(float x, const e4m3*) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}
KDEV unsigned quantise(float x, const int8*) {
  return (unsigned)__float2int_rn(fminf(fmaxf(x, -127.f), 127.f)) & 0xffu;
}

template <typename T, typename C>
KDEV void store8(C* to, const T* from, float scale) {
  const Vec16 x = *(const Vec16*)from;
  if constexpr (sizeof(C) == 2) {
    *(Vec16*)to = x;
  } else {
    uint2 bytes = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a, b;
      unpack2(a, b, x.u[i], (const T*)0);
      const unsigned pair =
          quantise(a / scale, (const C*)0) | quantise(b / scale, (const C*)0) << 8;
      (i < 2 ? bytes.x : bytes.y) |= pair << (i % 2 * 16);
    }
    *(uint2*)to = bytes;
  }
}

template <typename T, typename C, int HD>
KDEV void store_kv(C* cache_keys, C* cache_values, const T* keys, const T* values,
                   const long long* slots, const float* key_scale, const float* value_scale,
                   int num_tokens, int num_kv_heads, int block_shift, long long key_stride,
                   long long value_stride) {
  const int parts = num_kv_heads * (HD / 8);  // of a token
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int token = (int)(index / parts), part = (int)(index % parts);
  if (token >= num_tokens) return;
  const long long slot = slots[token];
  if (slot < 0) return;
  const int head = part / (HD / 8), d = part % (HD / 8) * 8;
  const long long row = ((slot >> block_shift) * num_kv_heads + head) << block_shift;
  const long long to = (row + (slot & ((1 << block_shift) - 1))) * HD + d;
  constexpr bool scaled = sizeof(C) == 1;
  store8(cache_keys + to, keys + token * key_stride + head * HD + d,
         scaled ? key_scale[head] : 1.f);
  store8(cache_values + to, values + token * value_stride + head * HD + d,
         scaled ? value_scale[head] : 1.f);
}
