// out[M, N] = x[M, K] @ w[N, K]^T + bias for many rows, on tensor cores.
//
// x     T [M, K], rows x_stride apart (a multiple of 8); w T [N, K], rows of K elements, K % 8 == 0
// bias  f32[N]
// out   Out [M, columns], rows out_stride apart; columns is N, or N / 2 with SILU_MUL
// T     bf16 or half; Out is T or float; products are exact, sums float32
//
// The order of a sum. K is cut into slices of `slice` elements, a number that depends on K alone
// (at most 8 slices). A slice is one chain of mma.m16n8k16 in the order of k, from 0; slices are
// added in their order. That order holds for every tile shape, split or not, and in few_rows
// (gemv.cu), so an element's bits depend on its row of x and its row of w only.
//
// Grid: x = tiles of the product, 8 row tiles side by side before the next column tile, so that
// CTAs that run together share rows of x and w in L2; y = slices in gemm_slice, else 1. There a
// CTA writes the sums of one slice to the workspace, f32 [slices, M, width] (width: N rounded up to
// whole 16-column groups, see workspace_width), and gemm_reduce adds them in order.
//
// A CTA holds STAGES tiles of BK columns of x (BM rows) and w (BN rows) in shared memory, swizzled;
// STAGES - 1 are on their way (cp.async, 16 bytes each) while one is multiplied. Shared memory:
// STAGES * (BM + BN) * BK * 2 bytes, 96 KiB for 128x128x64 in 3 stages.
//
// Bytes from L2: (M K ceil(N / BN) + N K ceil(M / BM)) 2; from memory at least (M K + N K) 2 and
// out. FLOPs: 2 M N K.
//
// gate_up with SILU_MUL: w is [gate | up], two halves of N / 2 rows. Of 32 rows of a tile 16 are
// gate and 16 the same columns of up, so a lane has both and writes silu(gate) * up.
//
// mma.sync reaches about two thirds of an H100's dense peak (arXiv:2402.13499); the way to the
// rest, wgmma with TMA, would be another kernel behind the same launcher, chosen in gpu/tuned.py.
#include "linear.cuh"

constexpr int ROW_TILES_TOGETHER = 8;

template <int BM_, int BN_, int BK_, int STAGES_, int WARPS_M_, int WARPS_N_>
struct Shape {
  static constexpr int BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_;
  static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;   // a warp's part of the tile
  static constexpr int ROW_FRAGMENTS = WM / 16, GROUPS = WN / 16;
  static constexpr int STAGE = (BM + BN) * BK;                 // elements
  static_assert(WM % 16 == 0 && WN % 32 == 0, "a warp takes 16 rows and 32 columns at a time");
};

template <class S>
struct Accumulator {
  float v[S::ROW_FRAGMENTS][S::GROUPS][2][4];   // two n8 fragments for each group of 16 columns
};

// Column, within its group of 16, of row r of a group in the tile of w. A lane holds elements 2t
// and 2t + 1 of both n8 fragments; in this order they are the four neighbouring columns 4t..4t+3.
KDEV int group_column(int r) { return 4 * ((r & 7) >> 1) + 2 * (r >> 3) + (r & 1); }

// First column of group `group` of the product, and whether it is of the half `up`.
template <int EPILOGUE>
KDEV int first_column(int group) { return EPILOGUE == SILU_MUL ? 16 * (group >> 1) : 16 * group; }

// Row of w for row `row` of the tile grid's columns; N where there is none.
template <int EPILOGUE>
KDEV int weight_row(int row, int N) {
  const int group = row >> 4, column = first_column<EPILOGUE>(group) + group_column(row & 15);
  if (EPILOGUE != SILU_MUL) return column;
  return column < N / 2 ? column + (group & 1 ? N / 2 : 0) : N;
}

// A thread's share in copying tiles of ROWS rows: always the same rows, one 16-byte chunk of each.
template <class S, int ROWS, typename T>
struct Copier {
  static constexpr int CHUNKS = S::BK / 8, STEP = S::THREADS / CHUNKS, COUNT = ROWS / STEP;
  static_assert(ROWS % STEP == 0, "threads and rows do not match");
  const T* source[COUNT];
  bool there[COUNT];

  template <class RowOf>
  KDEV void point(const T* matrix, long long stride, int limit, RowOf row_of) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int row = row_of((int)threadIdx.x / CHUNKS + i * STEP);
      there[i] = row < limit;
      source[i] = matrix + (there[i] ? row * stride : 0);
    }
  }
  KDEV void copy(T* tile, int k, int k_end) const {
    const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
    k += 8 * chunk;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool inside = there[i] && k < k_end;
      T* to = tile + swizzled<S::BK>(row + i * STEP, chunk);
      cp_async16(to, source[i] + (inside ? k : 0), inside);
    }
  }
};

// acc += the warp's part of one tile of x times one tile of w.
template <class S, typename T>
KDEV void multiply_tile(Accumulator<S>& acc, const T* x_tile, const T* w_tile) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int m = warp / S::WARPS_N * S::WM, n = warp % S::WARPS_N * S::WN;
#pragma unroll
  for (int chunk = 0; chunk < S::BK / 8; chunk += 2) {
    unsigned a[S::ROW_FRAGMENTS][4], b[S::GROUPS][4];
#pragma unroll
    for (int i = 0; i < S::ROW_FRAGMENTS; ++i)
      ldmatrix_x4(a[i], x_tile + swizzled<S::BK>(m + 16 * i + (lane & 15), chunk + (lane >> 4)));
#pragma unroll
    for (int p = 0; p < S::GROUPS; ++p)
      ldmatrix_x4(b[p], w_tile + swizzled<S::BK>(n + 16 * p + (lane & 7) + (lane >> 4) * 8,
                                                 chunk + ((lane >> 3) & 1)));
#pragma unroll
    for (int i = 0; i < S::ROW_FRAGMENTS; ++i)
#pragma unroll
      for (int p = 0; p < S::GROUPS; ++p)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned half_group[2] = {b[p][2 * j], b[p][2 * j + 1]};
          mma_m16n8k16(acc.v[i][p][j], a[i], half_group, (const T*)nullptr);
        }
  }
}

// total += acc; acc = 0.
template <class S>
KDEV void end_slice(Accumulator<S>& total, Accumulator<S>& acc) {
#pragma unroll
  for (int i = 0; i < S::ROW_FRAGMENTS; ++i)
#pragma unroll
    for (int p = 0; p < S::GROUPS; ++p)
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        total.v[i][p][e >> 2][e & 3] += acc.v[i][p][e >> 2][e & 3];
        acc.v[i][p][e >> 2][e & 3] = 0.0f;
      }
}

KDEV void load4(float (&v)[4], const float* p) {
  const Vec16 q = *reinterpret_cast<const Vec16*>(p);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __uint_as_float(q.u[i]);
}
KDEV void store4(float* p, const float (&v)[4]) {
  Vec16 q;
#pragma unroll
  for (int i = 0; i < 4; ++i) q.u[i] = __float_as_uint(v[i]);
  *reinterpret_cast<Vec16*>(p) = q;
}
struct __align__(8) Vec8 {
  unsigned u[2];
};
template <typename T>
KDEV void load4(float (&v)[4], const T* p) {
  const Vec8 q = *reinterpret_cast<const Vec8*>(p);
  unpack2(v[0], v[1], q.u[0], p);
  unpack2(v[2], v[3], q.u[1], p);
}
template <typename T>
KDEV void store4(T* p, const float (&v)[4]) {
  Vec8 q;
  q.u[0] = pack2(v[0], v[1], p);
  q.u[1] = pack2(v[2], v[3], p);
  *reinterpret_cast<Vec8*>(p) = q;
}

// p[0..3], of which `count` exist, zeros for the rest; at once where `whole` allows it.
template <typename T>
KDEV void load_up_to4(float (&v)[4], const T* p, int count, bool whole) {
  if (whole && count >= 4) {
    load4(v, p);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = i < count ? to_float(p[i]) : 0.0f;
  }
}

// The last step for four neighbouring columns of one row: bias, then the epilogue. `up` is read
// with SILU_MUL only; whole: four elements of out may be read and written at once.
template <int EPILOGUE, typename Out>
KDEV void finish4(Out* out, int column, int columns, float (&v)[4], const float (&up)[4],
                  const float* bias, bool whole) {
  float add[4], old[4];
  load_up_to4(add, bias + column, columns - column, true);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] += add[i];
  if (EPILOGUE == SILU_MUL) {
    load_up_to4(add, bias + columns + column, columns - column, columns % 4 == 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = silu(v[i]) * (up[i] + add[i]);
  }
  if (EPILOGUE == ADD) {
    load_up_to4(old, out + column, columns - column, whole);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += old[i];
  }
  if (whole && column + 4 <= columns) {
    store4(out + column, v);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < columns) out[column + i] = from_float<Out>(v[i]);
  }
}

template <typename Out>
KDEV bool can_store4(const Out* out, long long out_stride) {
  return (((unsigned long long)out | (unsigned long long)out_stride * sizeof(Out)) %
          (4 * sizeof(Out))) == 0;
}

// Columns of the workspace: whole groups, with SILU_MUL gate and up in turn.
template <int EPILOGUE>
KDEV int workspace_width(int N) {
  return EPILOGUE == SILU_MUL ? (N / 2 + 15) / 16 * 32 : (N + 15) / 16 * 16;
}

// Hand each lane's quadruples to write(row, tile column, values, values of the next group).
template <class S, int GROUP_STEP, class Write>
KDEV void for_each_quad(Accumulator<S>& sums, int m0, int n0, Write write) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int m = m0 + warp / S::WARPS_N * S::WM + (lane >> 2);
  const int n = n0 + warp % S::WARPS_N * S::WN + 4 * (lane & 3);
#pragma unroll
  for (int i = 0; i < S::ROW_FRAGMENTS; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int p = 0; p < S::GROUPS; p += GROUP_STEP) {
        float quads[2][4];
#pragma unroll
        for (int e = 0; e < 8; ++e)
          quads[e >> 2][e & 3] =
              sums.v[i][(e >> 2) * (GROUP_STEP - 1) + p][(e >> 1) & 1][2 * h + (e & 1)];
        write(m + 16 * i + 8 * h, n + 16 * p, quads[0], quads[1]);
      }
}

// Sums over k in [k_begin, k_end), slice by slice, of the tile at row m0 of x and row n0 of the
// tile grid's columns.
template <class S, int EPILOGUE, typename T>
KDEV void sum_tile(Accumulator<S>& total, const T* x, long long x_stride, const T* w, int m0,
                   int n0, int M, int N, int K, int k_begin, int k_end, int slice) {
  DYN_SMEM(smem);
  T* stages = reinterpret_cast<T*>(smem);
  Copier<S, S::BM, T> x_copier;
  Copier<S, S::BN, T> w_copier;
  x_copier.point(x, x_stride, M, [&](int r) { return m0 + r; });
  w_copier.point(w, K, N, [&](int r) { return weight_row<EPILOGUE>(n0 + r, N); });
  const int num_tiles = (k_end - k_begin + S::BK - 1) / S::BK, tiles_a_slice = slice / S::BK;
  auto copy = [&](int tile) {
    if (tile < num_tiles) {
      T* stage = stages + tile % S::STAGES * S::STAGE;
      x_copier.copy(stage, k_begin + tile * S::BK, k_end);
      w_copier.copy(stage + S::BM * S::BK, k_begin + tile * S::BK, k_end);
    }
    cp_async_commit();   // an empty group where there is no tile, so that waits count alike
  };
  for (int tile = 0; tile < S::STAGES - 1; ++tile) copy(tile);
  Accumulator<S> acc = {};
  int left = tiles_a_slice;
  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait<S::STAGES - 2>();
    __syncthreads();   // the tile is there, and nobody reads the one whose stage is filled next
    copy(tile + S::STAGES - 1);
    const T* stage = stages + tile % S::STAGES * S::STAGE;
    multiply_tile<S>(acc, stage, stage + S::BM * S::BK);
    if (--left == 0 || tile + 1 == num_tiles) {
      end_slice<S>(total, acc);
      left = tiles_a_slice;
    }
  }
}

// First row and column of the CTA's tile.
template <class S>
KDEV void locate_tile(int& m0, int& n0, int M, int N) {
  const int row_tiles = (M + S::BM - 1) / S::BM, column_tiles = (N + S::BN - 1) / S::BN;
  const int together = ROW_TILES_TOGETHER * column_tiles;
  const int first = (int)blockIdx.x / together * ROW_TILES_TOGETHER;
  const int rows = min(row_tiles - first, ROW_TILES_TOGETHER), rest = (int)blockIdx.x % together;
  m0 = (first + rest % rows) * S::BM;
  n0 = rest / rows * S::BN;
}

// The whole product.
template <class S, int EPILOGUE, typename T, typename Out>
KDEV void gemm(const T* x, long long x_stride, const T* w, const float* bias, Out* out,
               long long out_stride, int M, int N, int K, int slice) {
  int m0, n0;
  locate_tile<S>(m0, n0, M, workspace_width<EPILOGUE>(N));
  Accumulator<S> total = {};
  sum_tile<S, EPILOGUE>(total, x, x_stride, w, m0, n0, M, N, K, 0, K, slice);
  const bool whole = can_store4(out, out_stride);
  constexpr int step = EPILOGUE == SILU_MUL ? 2 : 1;
  const int columns = N / step;
  for_each_quad<S, step>(total, m0, n0, [&](int m, int n, float (&v)[4], float (&up)[4]) {
    const int column = first_column<EPILOGUE>(n >> 4) + (n & 15);
    if (m < M) finish4<EPILOGUE>(out + m * out_stride, column, columns, v, up, bias, whole);
  });
}

// The sums of slice blockIdx.y, for gemm_reduce.
template <class S, int EPILOGUE, typename T>
KDEV void gemm_slice(const T* x, long long x_stride, const T* w, float* workspace, int M, int N,
                     int K, int slice) {
  const int width = workspace_width<EPILOGUE>(N), k_begin = blockIdx.y * slice;
  int m0, n0;
  locate_tile<S>(m0, n0, M, width);
  Accumulator<S> total = {};
  sum_tile<S, EPILOGUE>(total, x, x_stride, w, m0, n0, M, N, K, k_begin, min(k_begin + slice, K),
                        slice);
  float* partial = workspace + (long long)blockIdx.y * M * width;
  for_each_quad<S, 1>(total, m0, n0, [&](int m, int n, float (&v)[4], float (&)[4]) {
    if (m < M && n < width) store4(partial + (long long)m * width + n, v);
  });
}

// out = the slices' sums, added in order, with bias and epilogue. Grid: x = 4 columns a thread,
// y = rows.
template <int EPILOGUE, typename Out>
KDEV void gemm_reduce(const float* workspace, const float* bias, Out* out, long long out_stride,
                      int M, int N, int slices) {
  const int width = workspace_width<EPILOGUE>(N), columns = EPILOGUE == SILU_MUL ? N / 2 : N;
  const int column = 4 * (int)(blockIdx.x * blockDim.x + threadIdx.x), m = blockIdx.y;
  if (column >= columns) return;
  const int place = EPILOGUE == SILU_MUL ? column / 16 * 32 + column % 16 : column;
  float sums[4] = {}, up[4] = {}, part[4];
  for (int s = 0; s < slices; ++s) {
    const float* partial = workspace + ((long long)s * M + m) * width + place;
    load4(part, partial);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += part[i];
    if (EPILOGUE == SILU_MUL) {
      load4(part, partial + 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) up[i] += part[i];
    }
  }
  finish4<EPILOGUE>(out + m * out_stride, column, columns, sums, up, bias,
                    can_store4(out, out_stride));
}
