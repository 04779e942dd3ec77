// Kernels that are right, and look like what a careless checker would report.
#include "gpu.cuh"

// Sum of each block's slice of x: warps by shuffles, the block through shared memory.
extern "C" __global__ void __launch_bounds__(128) sum_block(const float* x, float* sums, int n) {
  SHARED(float, partial, [4]);
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  float sum = i < n ? x[i] : 0.0f;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(FULL_MASK, sum, step);
  if (lane == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) sums[blockIdx.x] = partial[0] + partial[1] + partial[2] + partial[3];
}

// Reverses x within each half of a warp; the halves wait for themselves only, again and again.
extern "C" __global__ void reverse_half_warps(const float* x, float* y, int rounds) {
  SHARED(float, s, [64]);
  const int base = threadIdx.x & ~15, mirror = base + 15 - threadIdx.x % 16;
  const unsigned half_warp = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  float value = x[threadIdx.x];
  for (int i = 0; i < rounds; ++i) {
    s[threadIdx.x] = value;
    __syncwarp(half_warp);
    value = s[mirror];
    __syncwarp(half_warp);
  }
  y[threadIdx.x] = value;
}

// c[16 x 8] of each block = a[16 x depth] @ b[8 x depth]^T, one warp, copies two tiles deep.
template <typename T>
KDEV void multiply_tile(const T* a, const T* b, float* c, int depth) {
  SHARED(T, tile_a, [2][16][16]);
  SHARED(T, tile_b, [2][16][16]);  // 8 rows used; ldmatrix_x4 reads 16
  const int lane = threadIdx.x, row = lane / 2, chunk = lane % 2 * 8;
  a += (long long)blockIdx.x * 16 * depth;
  const auto copy = [&](int stage, int k) {
    const bool inside = k < depth;
    const long long offset = (long long)row * depth + k + chunk;
    cp_async16(&tile_a[stage][row][chunk], a + (inside ? offset : 0), inside);
    cp_async16(&tile_b[stage][row][chunk], b + (inside && row < 8 ? offset : 0),
               inside && row < 8);
    cp_async_commit();
  };
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  copy(0, 0);
  for (int k = 0, stage = 0; k < depth; k += 16, stage ^= 1) {
    copy(stage ^ 1, k + 16);
    cp_async_wait<1>();
    __syncwarp();
    unsigned fa[4], fb[4];
    ldmatrix_x4(fa, &tile_a[stage][lane % 16][lane / 16 * 8]);
    ldmatrix_x4(fb, &tile_b[stage][lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
    const unsigned pair[2] = {fb[0], fb[1]};
    mma_m16n8k16(d, fa, pair, a);
    __syncwarp();
  }
  for (int i = 0; i < 4; ++i)
    c[(blockIdx.x * 16 + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

extern "C" __global__ void __launch_bounds__(32)
    multiply_bf16(const bf16* a, const bf16* b, float* c, int depth) {
  multiply_tile(a, b, c, depth);
}

extern "C" __global__ void __launch_bounds__(32)
    multiply_half(const half* a, const half* b, float* c, int depth) {
  multiply_tile(a, b, c, depth);
}

// How often each of 16 values occurs: atomics in shared, then in global memory.
extern "C" __global__ void count_values(const int* x, int* counts, int n) {
  SHARED(int, mine, [16]);
  if (threadIdx.x < 16) mine[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&mine[x[i]], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
}

// Threads past the end leave before the barrier, which the others pass without them.
extern "C" __global__ void leave_before_the_barrier(const float* x, float* y, int n) {
  SHARED(float, s, [64]);
  const int i = threadIdx.x;
  if (i >= n) return;
  s[i] = x[i];
  __syncthreads();
  y[i] = s[n - 1 - i];
}

// The last block adds up what all wrote; one thread passes the fence for its block.
extern "C" __global__ void take_over_by_one_fence(const float* x, float* y, unsigned* count) {
  SHARED(int, is_last, [1]);
  y[blockIdx.x * blockDim.x + threadIdx.x] = 2.0f * x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last[0] = atomicAdd(count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;
  float sum = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += __ldcg(&y[b * blockDim.x + threadIdx.x]);
  y[gridDim.x * blockDim.x + threadIdx.x] = sum;
}

// The same with a fence in every thread.
extern "C" __global__ void take_over_by_many_fences(const float* x, float* y, unsigned* count) {
  SHARED(int, is_last, [1]);
  y[blockIdx.x * blockDim.x + threadIdx.x] = 2.0f * x[threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last[0] = atomicAdd(count, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last[0]) return;
  float sum = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += __ldcg(&y[b * blockDim.x + threadIdx.x]);
  y[gridDim.x * blockDim.x + threadIdx.x] = sum;
}

// q and k are views of the same rows; q is changed in place.
extern "C" __global__ void add_in_place(float* q, const float* k, int row_stride) {
  const int i = blockIdx.x * row_stride + threadIdx.x;
  q[i] += k[i];
}
