// out[M, N] = x[M, K] @ w[N, K]^T + bias for few rows, bound by reading w once.
//
// Operands, types, epilogues and slices of K as in gemm.cu.
//
// few_rows, M <= 32, on tensor cores with the operands exchanged: rows of w are the 16 rows of an
// mma, rows of x its 8 columns, so that one row of x wastes little. A warp sums one slice of K for
// 16 * GROUPS rows of w, through a cp.async pipeline of its own (16 bytes each, STAGES deep,
// swizzled, no barrier but __syncwarp); the CTA adds the slices in order. Every sum has the order
// of gemm.cu, hence the same bits wherever mma gives a * b and b * a alike.
//   Grid: x = groups of 16 * GROUPS rows of w (with SILU_MUL half gate, half up). Block: a warp a
//   slice. Shared memory: slices * STAGES * (16 * GROUPS + ROWS) * 128 bytes; 72 KiB for 8 slices,
//   8 rows, 1 group, 3 stages, of which 32 KiB of w are on their way.
//
// gemv, M <= 4, on the plain cores: a warp owns COLUMNS columns, lanes read 16 bytes of each row of
// w and of x (from L1 after the first warp) and meet in shuffles. Its order of summing is another
// one: the launcher uses it only where bits may depend on the batch.
//   Grid: x = blockDim / 32 * COLUMNS columns. No shared memory.
//
// Bytes from memory: 2 N K + out; from L2 another 2 M K for each CTA. FLOPs: 2 M N K.
#include "linear.cuh"

constexpr int DEPTH = 64;   // columns of a stage: 128 bytes of a row

// The last step for one element. `up` is read with SILU_MUL only.
template <int EPILOGUE, typename Out>
KDEV void finish(Out* out, int column, int columns, float value, float up, const float* bias) {
  value += bias[column];
  if (EPILOGUE == SILU_MUL) value = silu(value) * (up + bias[columns + column]);
  if (EPILOGUE == ADD) value += to_float(*out);
  *out = from_float<Out>(value);
}

template <int ROWS_, int GROUPS_, int STAGES_>
struct Shape {
  static constexpr int ROWS = ROWS_, GROUPS = GROUPS_, STAGES = STAGES_;
  static constexpr int WIDTH = 16 * GROUPS, ROW_FRAGMENTS = ROWS / 8;
  static constexpr int STAGE = (WIDTH + ROWS) * DEPTH;   // elements
  static constexpr int PITCH = WIDTH + 4;                // floats; lanes of an mma meet no conflict
  static_assert(ROWS * PITCH * 4 <= STAGE * 2, "sums go where stages were");
};

template <class S>
struct Accumulator {
  float v[S::GROUPS][S::ROW_FRAGMENTS][4];
};

// acc += one tile of w times one tile of x.
template <class S, typename T>
KDEV void multiply_tile(Accumulator<S>& acc, const T* w_tile, const T* x_tile) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int chunk = 0; chunk < DEPTH / 8; chunk += 4) {
    unsigned b[S::ROW_FRAGMENTS][4];
#pragma unroll
    for (int f = 0; f < S::ROW_FRAGMENTS; ++f)
      ldmatrix_x4(b[f], x_tile + swizzled<DEPTH>(8 * f + (lane & 7), chunk + (lane >> 3)));
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int g = 0; g < S::GROUPS; ++g) {
        unsigned a[4];
        ldmatrix_x4(a, w_tile + swizzled<DEPTH>(16 * g + (lane & 15),
                                                chunk + 2 * step + (lane >> 4)));
#pragma unroll
        for (int f = 0; f < S::ROW_FRAGMENTS; ++f) {
          const unsigned b_step[2] = {b[f][2 * step], b[f][2 * step + 1]};
          mma_m16n8k16(acc.v[g][f], a, b_step, (const T*)nullptr);
        }
      }
  }
}

// Row of w for row r of the CTA's rows; N where there is none.
template <class S, int EPILOGUE>
KDEV int weight_row(int r, int N) {
  if (EPILOGUE != SILU_MUL) return (int)blockIdx.x * S::WIDTH + r;
  constexpr int half_width = S::WIDTH / 2;
  const int column = (int)blockIdx.x * half_width + r % half_width;
  return column < N / 2 ? column + (r < half_width ? 0 : N / 2) : N;
}

// The warp's sums over k in [k_begin, k_end); `stages` is its own.
template <class S, int EPILOGUE, typename T>
KDEV void sum_slice(Accumulator<S>& acc, T* stages, const T* x, long long x_stride, const T* w,
                    int M, int N, int K, int k_begin, int k_end) {
  const int lane = threadIdx.x & 31, chunk = lane & 7, first_row = lane >> 3;
  const T* source[S::WIDTH / 4];
  bool there[S::WIDTH / 4];
#pragma unroll
  for (int i = 0; i < S::WIDTH / 4; ++i) {
    const int row = weight_row<S, EPILOGUE>(first_row + 4 * i, N);
    there[i] = row < N;
    source[i] = w + (there[i] ? (long long)row * K : 0);
  }
  for (int stage = 0; stage < S::STAGES; ++stage)   // rows of x past the last are zeros for good
    for (int r = M + first_row; r < S::ROWS; r += 4)
      *reinterpret_cast<Vec16*>(stages + stage * S::STAGE + S::WIDTH * DEPTH +
                                swizzled<DEPTH>(r, chunk)) = Vec16{};
  const int num_tiles = (k_end - k_begin + DEPTH - 1) / DEPTH;
  auto copy = [&](int tile) {
    if (tile < num_tiles) {
      T* stage = stages + tile % S::STAGES * S::STAGE;
      const int k = k_begin + tile * DEPTH + 8 * chunk;
      const bool inside = k < k_end;
#pragma unroll
      for (int i = 0; i < S::WIDTH / 4; ++i)
        cp_async16(stage + swizzled<DEPTH>(first_row + 4 * i, chunk), source[i] + (inside ? k : 0),
                   inside && there[i]);
      for (int r = first_row; r < M; r += 4)
        cp_async16(stage + S::WIDTH * DEPTH + swizzled<DEPTH>(r, chunk),
                   x + r * x_stride + (inside ? k : 0), inside);
    }
    cp_async_commit();
  };
  for (int tile = 0; tile < S::STAGES - 1; ++tile) copy(tile);
  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait<S::STAGES - 2>();
    __syncwarp();   // the tile is there, and no lane reads the one whose stage is filled next
    copy(tile + S::STAGES - 1);
    const T* stage = stages + tile % S::STAGES * S::STAGE;
    multiply_tile<S>(acc, stage, stage + S::WIDTH * DEPTH);
  }
  cp_async_wait<0>();
  __syncwarp();
}

template <class S, int EPILOGUE, typename T, typename Out>
KDEV void few_rows(const T* x, long long x_stride, const T* w, const float* bias, Out* out,
                   long long out_stride, int M, int N, int K, int slice) {
  DYN_SMEM(smem);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slices = blockDim.x >> 5;
  constexpr int warp_bytes = S::STAGES * S::STAGE * 2;
  Accumulator<S> acc = {};
  sum_slice<S, EPILOGUE>(acc, reinterpret_cast<T*>(smem + warp * warp_bytes), x, x_stride, w, M, N,
                         K, warp * slice, min((warp + 1) * slice, K));
  // [ROWS][PITCH], rows of w inner
  float* own = reinterpret_cast<float*>(smem + warp * warp_bytes);
#pragma unroll
  for (int g = 0; g < S::GROUPS; ++g)
#pragma unroll
    for (int f = 0; f < S::ROW_FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        own[(8 * f + 2 * (lane & 3) + (e & 1)) * S::PITCH + 16 * g + (lane >> 2) + 8 * (e >> 1)] =
            acc.v[g][f][e];
  __syncthreads();
  constexpr int width = EPILOGUE == SILU_MUL ? S::WIDTH / 2 : S::WIDTH;
  const int columns = EPILOGUE == SILU_MUL ? N / 2 : N;
  for (int i = threadIdx.x; i < M * width; i += blockDim.x) {
    const int m = i / width, n = i % width, column = blockIdx.x * width + n;
    if (column >= columns) continue;
    float sum = 0.0f, up = 0.0f;
    for (int s = 0; s < slices; ++s) {
      const float* part = reinterpret_cast<const float*>(smem + s * warp_bytes) + m * S::PITCH + n;
      sum += part[0];
      if (EPILOGUE == SILU_MUL) up += part[width];
    }
    finish<EPILOGUE>(out + m * out_stride + column, column, columns, sum, up, bias);
  }
}

template <typename T>
KDEV void unpack8(float (&v)[8], const T* p) {
  const Vec16 q = *reinterpret_cast<const Vec16*>(p);
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack2(v[2 * i], v[2 * i + 1], q.u[i], p);
}

// ROWS is M rounded up to what is compiled; rows past M repeat the last and are not written.
template <int ROWS, int COLUMNS, int EPILOGUE, typename T, typename Out>
KDEV void gemv(const T* x, long long x_stride, const T* w, const float* bias, Out* out,
               long long out_stride, int M, int N, int K) {
  constexpr int halves = EPILOGUE == SILU_MUL ? 2 : 1;
  const int lane = threadIdx.x & 31, columns = N / halves;
  const int first = (int)(blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * COLUMNS;
  if (first >= columns) return;
  float sums[halves][COLUMNS][ROWS] = {};
#pragma unroll 2
  for (int k = 8 * lane; k < K; k += 256) {
    float x_part[ROWS][8], w_part[8];
#pragma unroll
    for (int m = 0; m < ROWS; ++m) unpack8(x_part[m], x + min(m, M - 1) * x_stride + k);
#pragma unroll
    for (int c = 0; c < halves * COLUMNS; ++c) {
      const int column = min(first + c % COLUMNS, columns - 1);
      unpack8(w_part, w + (long long)(column + c / COLUMNS * columns) * K + k);
#pragma unroll
      for (int m = 0; m < ROWS; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[c / COLUMNS][c % COLUMNS][m] += x_part[m][i] * w_part[i];
    }
  }
  float value = 0.0f, up = 0.0f;   // of row lane / COLUMNS, column lane % COLUMNS
#pragma unroll
  for (int c = 0; c < halves * COLUMNS; ++c)
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      float sum = sums[c / COLUMNS][c % COLUMNS][m];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
      if (lane == m * COLUMNS + c % COLUMNS) (c < COLUMNS ? value : up) = sum;
    }
  const int m = lane / COLUMNS, column = first + lane % COLUMNS;
  if (m < min(ROWS, M) && column < columns)
    finish<EPILOGUE>(out + m * out_stride + column, column, columns, value, up, bias);
}
