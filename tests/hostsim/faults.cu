// Small kernels with one fault each. The comment on the faulty line says what the checker must
// call it; a kernel with several such lines must be stopped at one of them.
#include "gpu.cuh"

extern "C" __global__ void read_past_the_end(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x + 1];  // fault: global-out-of-bounds
}

extern "C" __global__ void write_before_the_start(const float* x, float* y) {
  y[(int)threadIdx.x - 1] = x[threadIdx.x];  // fault: global-out-of-bounds
}

extern "C" __global__ void follow_a_bad_block_id(const float* x, const int* block_table, float* y) {
  y[threadIdx.x] = x[(long long)block_table[0] * 64 + threadIdx.x];  // fault: global-out-of-bounds
}

extern "C" __global__ void read_through_null(const int* offset, float* y) {
  const float* x = nullptr;
  y[threadIdx.x] = x[offset[0]];  // fault: global-out-of-bounds
}

extern "C" __global__ void write_const(const float* x) {
  const_cast<float*>(x)[threadIdx.x] = 1.0f;  // fault: read-only
}

extern "C" __global__ void load_misaligned_vector(const float* x, float* y) {
  const Vec16 v = *reinterpret_cast<const Vec16*>(x + 1 + 4 * threadIdx.x);  // fault: misaligned
  y[threadIdx.x] = __uint_as_float(v.u[0]);
}

extern "C" __global__ void index_past_static_shared(const float* x, float* y) {
  SHARED(float, s, [64]);
  s[threadIdx.x + 1] = x[threadIdx.x];  // fault: index
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x + 1];
}

extern "C" __global__ void use_too_much_dynamic_shared(const float* x, float* y) {
  DYN_SMEM(memory);
  float* s = reinterpret_cast<float*>(memory);
  s[threadIdx.x] = x[threadIdx.x];  // fault: shared-out-of-bounds
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void declare_too_much_static_shared(const float* x, float* y) {
  SHARED(float, s, [13000]);  // fault: shared-limit
  s[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void read_unset_shared(const float* x, float* y) {
  SHARED(float, s, [64]);
  if (threadIdx.x < 32) s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];  // fault: uninitialised-shared
}

// s is set and a barrier passed first, so that what is left is the race.
extern "C" __global__ void miss_syncthreads(const float* x, float* y) {
  SHARED(float, s, [64]);
  s[threadIdx.x] = 0.0f;
  __syncthreads();
  s[threadIdx.x] = x[threadIdx.x];   // fault: shared-race
  y[threadIdx.x] = s[63 - threadIdx.x];  // fault: shared-race
}

extern "C" __global__ void overwrite_before_all_have_read(const float* x, float* y) {
  SHARED(float, s, [64]);
  float sum = 0.0f;
  for (int k = 0; k < 4; ++k) {
    s[threadIdx.x] = x[threadIdx.x];  // fault: shared-race
    __syncthreads();
    sum += s[63 - threadIdx.x];  // fault: shared-race
  }
  y[threadIdx.x] = sum;
}

extern "C" __global__ void write_what_a_whole_warp_reads(const float* x, float* y) {
  SHARED(float, s, [1]);
  if (threadIdx.x == 0) s[0] = x[0];
  __syncthreads();
  y[threadIdx.x] = s[0];  // fault: shared-race
  if (threadIdx.x == 31) s[0] = 2.0f;  // fault: shared-race
}

extern "C" __global__ void miss_syncwarp(const float* x, float* y) {
  SHARED(float, s, [32]);
  s[threadIdx.x] = 0.0f;
  __syncwarp();
  s[threadIdx.x] = x[threadIdx.x];  // fault: shared-race
  y[threadIdx.x] = s[31 - threadIdx.x];  // fault: shared-race
}

extern "C" __global__ void sync_half_a_warp(const float* x, float* y) {
  SHARED(float, s, [32]);
  s[threadIdx.x] = 0.0f;
  __syncwarp();
  s[threadIdx.x] = x[threadIdx.x];  // fault: shared-race
  __syncwarp(threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
  y[threadIdx.x] = s[31 - threadIdx.x];  // fault: shared-race
}

// A shuffle brings lanes together, but orders no memory.
extern "C" __global__ void take_a_shuffle_for_a_barrier(const float* x, float* y) {
  SHARED(float, s, [32]);
  s[threadIdx.x] = x[threadIdx.x];
  const float other = __shfl_xor_sync(FULL_MASK, x[threadIdx.x], 1);
  y[threadIdx.x] = other + s[31 - threadIdx.x];  // fault: shared-race
}

extern "C" __global__ void read_a_copy_in_flight(const float* x, float* y) {
  SHARED(float, s, [256]);
  cp_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
  cp_async_commit();
  cp_async_wait<1>();
  y[threadIdx.x] = s[4 * threadIdx.x];  // fault: cp-async
}

extern "C" __global__ void wait_for_a_copy_never_committed(const float* x, float* y) {
  SHARED(float, s, [256]);
  cp_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
  cp_async_wait<0>();
  y[threadIdx.x] = s[4 * threadIdx.x];  // fault: cp-async
}

extern "C" __global__ void read_others_copies_without_barrier(const float* x, float* y) {
  SHARED(float, s, [256]);
  cp_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
  cp_async_commit();
  __syncthreads();
  cp_async_wait<0>();
  y[threadIdx.x] = s[4 * (63 - threadIdx.x)];  // fault: cp-async
}

extern "C" __global__ void write_under_a_copy(const float* x, float* y) {
  SHARED(float, s, [256]);
  cp_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
  s[4 * threadIdx.x] = 1.0f;  // fault: cp-async
  cp_async_commit();
  cp_async_wait<0>();
  y[threadIdx.x] = s[4 * threadIdx.x];
}

extern "C" __global__ void change_the_source_of_a_copy(float* x, float* y) {
  SHARED(float, s, [256]);
  cp_async16(s + 4 * threadIdx.x, x + 4 * threadIdx.x, true);  // fault: cp-async
  x[4 * threadIdx.x] = 7.0f;
  cp_async_commit();
  cp_async_wait<0>();
  y[threadIdx.x] = s[4 * threadIdx.x];
}

extern "C" __global__ void copy_misaligned(const float* x, float* y) {
  SHARED(float, s, [260]);
  cp_async16(s + 4 * threadIdx.x, x + 1 + threadIdx.x, true);  // fault: misaligned
  cp_async_commit();
  cp_async_wait<0>();
  y[threadIdx.x] = s[4 * threadIdx.x];
}

extern "C" __global__ void load_matrices_from_global(const float* x, float* y) {
  unsigned r[4];
  ldmatrix_x4(r, x + 4 * threadIdx.x);  // fault: wrong-memory
  y[threadIdx.x] = __uint_as_float(r[0]);
}

extern "C" __global__ void part_at_a_barrier(const float* x, float* y) {
  if (threadIdx.x < 32) {
    y[threadIdx.x] = x[threadIdx.x];
    __syncthreads();  // fault: divergent-barrier
  } else {
    y[threadIdx.x] = 0.0f;
    __syncthreads();  // fault: divergent-barrier
  }
}

extern "C" __global__ void shuffle_half_a_warp(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 16) v = __shfl_xor_sync(FULL_MASK, v, 1);  // fault: warp
  y[threadIdx.x] = v;
}

extern "C" __global__ void shuffle_from_outside_the_mask(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 16) v = __shfl_sync(0x0000ffffu, v, 20);  // fault: warp
  y[threadIdx.x] = v;
}

extern "C" __global__ void meet_in_different_calls(const float* x, float* y) {
  float v = x[threadIdx.x];
  if (threadIdx.x < 16)
    v = __shfl_xor_sync(FULL_MASK, v, 1);  // fault: warp
  else
    v = (float)__any_sync(FULL_MASK, v > 0.0f);  // fault: warp
  y[threadIdx.x] = v;
}

extern "C" __global__ void wait_for_each_other(const float* x, float* y) {
  if (threadIdx.x == 0)
    __syncthreads();  // fault: deadlock
  else
    __syncwarp();  // fault: deadlock
  y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void write_one_cell_from_two_blocks(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x];  // fault: global-race
}

extern "C" __global__ void add_without_atomic(const float* x, float* y) {
  y[0] += x[threadIdx.x];  // fault: global-race
}

extern "C" __global__ void read_what_others_add_to(const float* x, float* y) {
  atomicAdd(y, x[threadIdx.x]);  // fault: global-race
  y[1 + threadIdx.x] = y[0];     // fault: global-race
}

extern "C" __global__ void exchange_through_global_without_barrier(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x];                 // fault: global-race
  y[64 + threadIdx.x] = y[63 - threadIdx.x] + 1.0f;  // fault: global-race
}

// The last block adds up what the others wrote, but nobody passed a __threadfence.
extern "C" __global__ void hand_over_without_fence(const float* x, float* y, unsigned* count) {
  SHARED(int, is_last, [1]);
  y[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) is_last[0] = atomicAdd(count, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last[0]) return;
  float sum = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b)
    sum += y[b * blockDim.x + threadIdx.x];  // fault: global-race
  y[gridDim.x * blockDim.x + threadIdx.x] = sum;
}

// The fence comes before the writes of other threads, for there is no barrier between.
extern "C" __global__ void hand_over_without_barrier(const float* x, float* y, unsigned* count) {
  SHARED(int, is_last, [1]);
  y[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x == 0) {
    __threadfence();
    is_last[0] = atomicAdd(count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;
  float sum = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b)
    sum += y[b * blockDim.x + threadIdx.x];  // fault: global-race
  y[gridDim.x * blockDim.x + threadIdx.x] = sum;
}

extern "C" __global__ void wait_for_another_block(const float* x, unsigned* count, float* y) {
  while (atomicAdd(count, 0u) == 0) {  // fault: livelock
  }
  y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void overflow_a_row_offset(const float* x, float* y, int row, int stride) {
  y[threadIdx.x] = x[row * stride];  // fault: overflow
}

extern "C" __global__ void shift_too_far(const int* x, int* y) {
  y[threadIdx.x] = 1 << (x[threadIdx.x] + 32);  // fault: shift
}

extern "C" __global__ void divide_by_zero(const int* x, int* y) {
  y[threadIdx.x] = 5 / x[threadIdx.x];  // fault: division
}

extern "C" __global__ void convert_what_does_not_fit(const float* x, int* y) {
  y[threadIdx.x] = (int)(x[threadIdx.x] * 1e20f);  // fault: conversion
}
