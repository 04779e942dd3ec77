// RMSNorm over the last axis (Zhang and Sennrich 2019), alone and fused with the residual sum.
//
//   rms_norm            out = x / rms(x) * w
//   rms_norm_in_place   the same over x, for the heads of q and k
//   add_rms_norm        residual += x;  out = residual / rms(residual) * w
//
// w is `weight`, or 1 + weight with ONE_PLUS (Gemma). rms(x) = sqrt(mean(x ** 2) + eps). Arithmetic
// is float32, and out is rounded once.
//
// A row has D elements. Row r is head r % heads of token r / heads; tokens are x_stride elements
// apart, the heads of one lie side by side. THREADS threads share a row and hold it in registers,
// VEC neighbours each at a time, so that it is read once; blockDim = (THREADS, rows of a block),
// and more than one row only when a row is a warp's. A row's sum is taken in an order that D alone
// gives. Bytes moved: x once in, out once out, in add_rms_norm the residual once each way.
#include "gpu.cuh"

template <typename T, int VEC>
struct __align__(sizeof(T) * VEC < 16 ? sizeof(T) * VEC : 16) Pack {
  T v[VEC];
};

template <int D, int THREADS, int VEC>
struct Row {
  static constexpr int packs = D / VEC;
  static constexpr int chunks = (packs + THREADS - 1) / THREADS;
  static constexpr bool whole = packs % THREADS == 0;

  float v[chunks][VEC];

  // The chunk's place in the row, counted in packs.
  static KDEV int pack_of(int chunk) { return chunk * THREADS + (int)threadIdx.x; }
  static KDEV bool has(int chunk) { return whole || pack_of(chunk) < packs; }

  template <typename T>
  KDEV void load(const T* x) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (!has(c)) continue;
      const Pack<T, VEC> pack = ((const Pack<T, VEC>*)x)[pack_of(c)];
#pragma unroll
      for (int i = 0; i < VEC; ++i) v[c][i] = to_float(pack.v[i]);
    }
  }

  template <typename T>
  KDEV void store(T* out) const {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (!has(c)) continue;
      Pack<T, VEC> pack;
#pragma unroll
      for (int i = 0; i < VEC; ++i) pack.v[i] = from_float<T>(v[c][i]);
      ((Pack<T, VEC>*)out)[pack_of(c)] = pack;
    }
  }

  KDEV void add(const Row& other) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (!has(c)) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) v[c][i] += other.v[c][i];
    }
  }

  KDEV float sum_of_squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (!has(c)) continue;
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum += v[c][i] * v[c][i];
    }
    return sum;
  }

  template <bool ONE_PLUS>
  KDEV void scale(float by, const float* weight) {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      if (!has(c)) continue;
      const Pack<float, VEC> pack = ((const Pack<float, VEC>*)weight)[pack_of(c)];
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float w = ONE_PLUS ? 1.0f + pack.v[i] : pack.v[i];
        v[c][i] = v[c][i] * by * w;
      }
    }
  }
};

// The sum over the threads of a row, in each of them.
template <int THREADS>
KDEV float row_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_MASK, x, offset);
  if (THREADS == 32) return x;
  constexpr int warps = THREADS / 32;
  SHARED(float, partial, [warps]);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < warps; ++w) sum += partial[w];
  return sum;
}

template <int D, int THREADS, int VEC, bool ONE_PLUS>
KDEV void normalise(Row<D, THREADS, VEC>& row, const float* weight, float eps) {
  const float mean = row_sum<THREADS>(row.sum_of_squares()) / (float)D;
  row.template scale<ONE_PLUS>(rsqrtf(mean + eps), weight);
}

// The row of this thread; uniform over a warp.
KDEV int row_index() { return (int)(blockIdx.x * blockDim.y + threadIdx.y); }

template <int D>
KDEV long long row_offset(int row, int heads, long long stride) {
  return (long long)(row / heads) * stride + (long long)(row % heads) * D;
}

template <typename S, typename T, int D, int THREADS, int VEC, bool ONE_PLUS>
KDEV void rms_norm(T* out, const S* x, const float* weight, int num_rows, int heads,
                   long long out_stride, long long x_stride, float eps) {
  const int r = row_index();
  if (r >= num_rows) return;
  Row<D, THREADS, VEC> row;
  row.load(x + row_offset<D>(r, heads, x_stride));
  normalise<D, THREADS, VEC, ONE_PLUS>(row, weight, eps);
  row.store(out + row_offset<D>(r, heads, out_stride));
}

template <typename T, int D, int THREADS, int VEC, bool ONE_PLUS>
KDEV void rms_norm_in_place(T* x, const float* weight, int num_rows, int heads,
                            long long x_stride, float eps) {
  rms_norm<T, T, D, THREADS, VEC, ONE_PLUS>(x, x, weight, num_rows, heads, x_stride, x_stride,
                                            eps);
}

template <typename T, int D, int THREADS, int VEC, bool ONE_PLUS>
KDEV void add_rms_norm(T* out, const T* x, float* residual, const float* weight, int num_rows,
                       float eps) {
  const int r = row_index();
  if (r >= num_rows) return;
  const long long offset = (long long)r * D;
  Row<D, THREADS, VEC> row, delta;
  row.load(residual + offset);
  delta.load(x + offset);
  row.add(delta);
  row.store(residual + offset);
  normalise<D, THREADS, VEC, ONE_PLUS>(row, weight, eps);
  row.store(out + offset);
}
