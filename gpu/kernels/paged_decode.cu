// Attention of requests with one query over a paged KV cache, split over the sequence.
//
// paged_decode: the part of one item (request, partition) and one tile of query heads of a KV head.
// paged_reduce: combines a request's partitions in their order.
//
// q, out        T[num_tokens, num_heads, HD], rows q_stride and out_stride elements apart
// keys, values  C[num_blocks, num_kv_heads, block_size, HD], block_size = 1 << block_shift >= 8
// items         i32[num_items, 2], (request, partition); a request's items lie in partition order
// sizes         i32[2], numbers of items and of requests: read on the device, so that a graph that
//               was captured with a larger grid can be replayed
// requests, first_items  i32[num_requests], and where in items a request's begin
// partial_out   f32[num_items, num_heads, HD], sum(exp2(x - top) * v); partial_top, partial_sum
//               f32[num_items, num_heads]
//
// A partition is partition_tokens keys, counted from position 0, whatever the batch; so a request's
// result does not depend on what else is in the batch. Where one partition holds all visible keys
// paged_decode writes `out` itself. Partitions before the window are not computed and not read.
//
// Grid: (num_kv_heads * ceil(group / (8 * TILES)), min(num_items, a limit)), 128 threads; blocks
// take items grid.y apart. paged_reduce: (num_heads, num_requests), 128 threads.
//
// A warp takes 16 keys at a time and computes transposed: scores^T[16 keys, 8 heads] = K Q^T, then
// out^T[HD, 8 heads] += V^T P^T, with mma m16n8k16. Keys and values go from global memory into
// fragments in registers, 16 bytes a load: the sums run over head_dim in the order in which a
// lane's bytes lie, and the rows of V^T are permuted likewise, so nothing passes through shared
// memory. The next 16 keys are in flight during the softmax (not at HD = 256, for want of
// registers). Tensor cores serve all groups alike: a column that no head fills costs nothing where
// memory is the limit, and fp32 units would need group + 1 instructions an element.
//
// Bytes: 2 * HD * sizeof(C) a key and KV head, once for each tile of heads; partial results
// (HD + 2) * 4 a head and partition, written and read once: 3 % at group 4 and 256 tokens.
// Expected: at most 168 registers for HD <= 128 and TILES = 1 (three blocks an SM), else 255, no
// spills; shared memory 4 * 8 * TILES * (HD + 4) floats and less than 1 KiB: 17.3 KiB at HD = 128.
//
// Flash-Decoding: Dao, Haziza, Massa, Sizov, 2023. Online softmax: Milakov, Gimelshein, 2018.
#include "attention.cuh"

constexpr int DECODE_WARPS = 4;
constexpr int MAX_PARTITION_BLOCKS = 128;

// A warp's state: heads 8 * n + 2 * (lane % 4) + {0, 1} of the tile; acc[n][j] holds elements 2 * j
// (first two) and 2 * j + 1 of the lane's share of the row.
template <int HD, int TILES>
struct DecodeState {
  float acc[TILES][HD / 16][4];
  float top[TILES][2], sum[TILES][2];
};

// The A fragment of 16 keys, step s of 16 elements of head_dim: rows are keys.
template <typename T, typename C, int WORDS>
KDEV void key_fragment(unsigned (&a)[4], const unsigned (&low)[WORDS],
                       const unsigned (&high)[WORDS], int s) {
  if constexpr (sizeof(C) == 2) {
    a[0] = low[2 * s];
    a[1] = high[2 * s];
    a[2] = low[2 * s + 1];
    a[3] = high[2 * s + 1];
  } else {
    a[0] = widen2<T>(low[s], (const C*)0);
    a[1] = widen2<T>(high[s], (const C*)0);
    a[2] = widen2<T>(low[s] >> 16, (const C*)0);
    a[3] = widen2<T>(high[s] >> 16, (const C*)0);
  }
}

// The A fragment of elements 2 * j and 2 * j + 1 of the shares, as rows, of 16 keys, as columns:
// v holds keys 2t, 2t + 1, 2t + 8, 2t + 9.
template <typename T, typename C, int WORDS>
KDEV void value_fragment(unsigned (&a)[4], const unsigned (&v)[4][WORDS], int j) {
  if constexpr (sizeof(C) == 2) {
    a[0] = __byte_perm(v[0][j], v[1][j], 0x5410);
    a[1] = __byte_perm(v[0][j], v[1][j], 0x7632);
    a[2] = __byte_perm(v[2][j], v[3][j], 0x5410);
    a[3] = __byte_perm(v[2][j], v[3][j], 0x7632);
  } else {
    const unsigned order = j % 2 ? 0x7362 : 0x5140;
    const unsigned early = __byte_perm(v[0][j / 2], v[1][j / 2], order);
    const unsigned late = __byte_perm(v[2][j / 2], v[3][j / 2], order);
    a[0] = widen2<T>(early, (const C*)0);
    a[1] = widen2<T>(early >> 16, (const C*)0);
    a[2] = widen2<T>(late, (const C*)0);
    a[3] = widen2<T>(late >> 16, (const C*)0);
  }
}

// Online softmax over 16 keys: scores become weights as B fragments, the state is rescaled.
// `low` and `high` say whether keys lane / 4 and lane / 4 + 8 are visible.
template <typename T, int HD, int TILES>
KDEV void weigh(DecodeState<HD, TILES>& state, unsigned (&weights)[TILES][2],
                const float (&scores)[TILES][4], bool low, bool high, ScoreMap map) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    float x[4], shrink[2], w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = (i < 2 ? low : high) ? exponent_of(scores[n][i], map) : NEG_INF;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = fmaxf(x[i], x[i + 2]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2)
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, offset));
      const float top = fmaxf(state.top[n][i], most), base = finite_top(top);
      shrink[i] = ex2(state.top[n][i] - base);
      state.top[n][i] = top;
      x[i] = ex2(x[i] - base);
      x[i + 2] = ex2(x[i + 2] - base);
    }
    const unsigned first = pack2(x[0], x[1], (const T*)0), second = pack2(x[2], x[3], (const T*)0);
    // The sum is over weights as they are multiplied, rounded to T.
    unpack2(w[0], w[1], first, (const T*)0);
    unpack2(w[2], w[3], second, (const T*)0);
#pragma unroll
    for (int i = 0; i < 2; ++i) state.sum[n][i] = state.sum[n][i] * shrink[i] + w[i] + w[i + 2];
    weights[n][0] = movmatrix_trans(first);
    weights[n][1] = movmatrix_trans(second);
#pragma unroll
    for (int j = 0; j < HD / 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.acc[n][j][i] *= shrink[i % 2];
  }
}

// Where the keys of a partition lie, for one KV head.
template <int HD>
struct PartitionRows {
  const int* block_ids;  // of the partition's blocks, in shared memory
  int first_block, begin, end, head, num_kv_heads, block_shift;

  KDEV bool holds(int token) const { return token >= begin && token < end; }
  template <typename C>
  KDEV const C* row(const C* cache, int token) const {
    if (!holds(token)) return cache;
    const int block_id = block_ids[(token >> block_shift) - first_block];
    return cache + row_of<HD>(block_id, token, head, num_kv_heads, block_shift);
  }
};

// One warp's keys: 16 at every 16 * DECODE_WARPS of the partition.
template <typename T, typename C, int HD, int TILES>
KDEV void attend_warp(DecodeState<HD, TILES>& state, const unsigned (&queries)[TILES][HD / 16][2],
                      const C* keys, const C* values, const PartitionRows<HD>& rows,
                      ScoreMap map) {
  typedef LaneShare<C, HD, 4> KeyShare;
  typedef LaneShare<C, HD, 8> ValueShare;
  constexpr bool PREFETCH = HD <= 128;  // registers for the next keys beside these values
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned low[KeyShare::WORDS], high[KeyShare::WORDS], v[4][ValueShare::WORDS];
  const auto load_keys = [&](int first) {
    KeyShare::load(low, rows.row(keys, first + g), t, rows.holds(first + g));
    KeyShare::load(high, rows.row(keys, first + g + 8), t, rows.holds(first + g + 8));
  };
  int first = (rows.begin & ~15) + 16 * (threadIdx.x >> 5);
  if (PREFETCH) load_keys(first);
  for (; first < rows.end; first += 16 * DECODE_WARPS) {
    if (!PREFETCH) load_keys(first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first + 2 * t + (i & 1) + (i & 2) * 4;
      ValueShare::load(v[i], rows.row(values, token), g, rows.holds(token));
    }
    float scores[TILES][4] = {};
    unsigned a[4], weights[TILES][2];
#pragma unroll
    for (int s = 0; s < HD / 16; ++s) {
      key_fragment<T, C>(a, low, high, s);
#pragma unroll
      for (int n = 0; n < TILES; ++n) mma_m16n8k16(scores[n], a, queries[n][s], (const T*)0);
    }
    if (PREFETCH) load_keys(first + 16 * DECODE_WARPS);
    weigh<T>(state, weights, scores, rows.holds(first + g), rows.holds(first + g + 8), map);
#pragma unroll
    for (int j = 0; j < HD / 16; ++j) {
      value_fragment<T, C>(a, v, j);
#pragma unroll
      for (int n = 0; n < TILES; ++n) mma_m16n8k16(state.acc[n][j], a, weights[n], (const T*)0);
    }
  }
}

// Queries as B fragments (columns are heads), in the order of head_dim in which keys are loaded.
template <typename T, typename C, int HD, int TILES>
KDEV void load_queries(unsigned (&queries)[TILES][HD / 16][2], const T* q, int num_heads) {
  const int lane = threadIdx.x & 31, head = lane >> 2;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int s = 0; s < HD / 16; ++s) {
      queries[n][s][0] = queries[n][s][1] = 0;
      if (8 * n + head < num_heads)
        load_words<8>(queries[n][s], q + (8 * n + head) * HD +
                                         LaneShare<C, HD, 4>::dim(4 * s, lane & 3));
    }
}

// Where the e-th element of lane group g's share of a row lies in shared memory, so that neither
// the fragments that are written nor the rows that are read meet in a bank.
KDEV int shared_column(int e, int g) { return 8 * e + ((g + e + e / 8 * 2) & 7); }

template <typename C, int HD, int TILES>
KDEV void store_warp(DecodeState<HD, TILES>& state, float (*s_out)[HD + 4], float* s_top,
                     float* s_sum) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 8 * n + 2 * t + i;
      float sum = state.sum[n][i];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, offset);
      if (g == 0) {
        s_top[head] = state.top[n][i];
        s_sum[head] = sum;
      }
#pragma unroll
      for (int j = 0; j < HD / 16; ++j) {
        s_out[head][shared_column(2 * j, g)] = state.acc[n][j][i];
        s_out[head][shared_column(2 * j + 1, g)] = state.acc[n][j][i + 2];
      }
    }
}

template <typename T, typename C, int HD, int TILES>
KDEV void paged_decode(T* out, float* partial_out, float* partial_top, float* partial_sum,
                       const T* q, const C* keys, const C* values, const int* block_tables,
                       const int* seq_lens, const int* query_start_loc, const int* items,
                       const int* sizes, const float* key_scale, const float* value_scale,
                       const float* sinks, int has_sinks, int num_heads, int num_kv_heads,
                       int block_shift, int max_blocks, int partition_tokens, long long q_stride,
                       long long out_stride, float scale, float soft_cap, int window) {
  constexpr int HEADS = 8 * TILES, THREADS = 32 * DECODE_WARPS;
  SHARED(int, block_ids, [MAX_PARTITION_BLOCKS]);
  SHARED(float, s_out, [DECODE_WARPS][HEADS][HD + 4]);
  SHARED(float, s_top, [DECODE_WARPS][HEADS]);
  SHARED(float, s_sum, [DECODE_WARPS][HEADS]);
  const int group = num_heads / num_kv_heads, kv_head = blockIdx.x % num_kv_heads;
  const int first_head = blockIdx.x / num_kv_heads * HEADS;  // in the group
  const int tile_heads = min(HEADS, group - first_head), warp = threadIdx.x >> 5;
  const int head = kv_head * group + first_head;
  const ScoreMap map = score_map(sizeof(C) == 1 ? scale * key_scale[kv_head] : scale, soft_cap);
  const float value_factor = sizeof(C) == 1 ? value_scale[kv_head] : 1.f;

  for (int item = blockIdx.y; item < sizes[0]; item += gridDim.y) {
    const int request = items[2 * item], partition = items[2 * item + 1];
    const int seq_len = seq_lens[request], token = query_start_loc[request];
    const int first_key = first_visible(seq_len - 1, window);
    const int begin = max(first_key, partition * partition_tokens);
    const int end = min(seq_len, (partition + 1) * partition_tokens);
    if (begin >= end) continue;
    const int first_block = begin >> block_shift;
    for (int i = threadIdx.x; i <= ((end - 1) >> block_shift) - first_block; i += THREADS)
      block_ids[i] = block_tables[(long long)request * max_blocks + first_block + i];
    __syncthreads();

    DecodeState<HD, TILES> state = {};
#pragma unroll
    for (int n = 0; n < TILES; ++n) state.top[n][0] = state.top[n][1] = NEG_INF;
    unsigned queries[TILES][HD / 16][2];
    load_queries<T, C, HD, TILES>(queries, q + token * q_stride + head * HD, tile_heads);
    const PartitionRows<HD> rows = {block_ids,    first_block, begin, end, kv_head,
                                    num_kv_heads, block_shift};
    attend_warp<T, C>(state, queries, keys, values, rows, map);
    store_warp<C>(state, s_out[warp], s_top[warp], s_sum[warp]);
    __syncthreads();

    const bool whole = first_key >= partition * partition_tokens && end == seq_len;
    for (int i = threadIdx.x; i < tile_heads * HD; i += THREADS) {
      typedef LaneShare<C, HD, 8> Share;
      const int h = i / HD, d = i % HD;
      const int column = shared_column(Share::element_of(d), Share::lane_of(d));
      float top = s_top[0][h], sum = 0.f, value = 0.f;
#pragma unroll
      for (int w = 1; w < DECODE_WARPS; ++w) top = fmaxf(top, s_top[w][h]);
#pragma unroll
      for (int w = 0; w < DECODE_WARPS; ++w) {
        const float factor = ex2(s_top[w][h] - top);
        sum += factor * s_sum[w][h];
        value += factor * s_out[w][h][column];
      }
      if (whole) {
        const float sink = has_sinks ? sinks[head + h] : 0.f;
        value *= normaliser(top, sum, has_sinks, sink) * value_factor;
        out[token * out_stride + (head + h) * HD + d] = from_float<T>(value);
      } else {
        const long long row = (long long)item * num_heads + head + h;
        partial_out[row * HD + d] = value;
        if (d == 0) {
          partial_top[row] = top;
          partial_sum[row] = sum;
        }
      }
    }
    // No barrier: the next item's first one comes before anything read here is written.
  }
}

// One head of one request; C only says whether there is a value_scale.
template <typename T, typename C, int HD>
KDEV void paged_reduce(T* out, const float* partial_out, const float* partial_top,
                       const float* partial_sum, const int* seq_lens, const int* query_start_loc,
                       const int* requests, const int* first_items, const int* sizes,
                       const float* value_scale, const float* sinks, int has_sinks, int num_heads,
                       int num_kv_heads, int partition_tokens, long long out_stride, int window) {
  SHARED(float, s_out, [DECODE_WARPS][HD]);
  SHARED(float, s_sum, [DECODE_WARPS]);
  const int head = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (blockIdx.y >= sizes[1]) return;
  const int request = requests[blockIdx.y], seq_len = seq_lens[request];
  const int first = first_visible(seq_len - 1, window) / partition_tokens;
  const int last = (seq_len - 1) / partition_tokens;
  if (first == last) return;  // paged_decode wrote the output
  const long long item = first_items[blockIdx.y];
  float top = NEG_INF;
  for (int p = first + lane; p <= last; p += 32)
    top = fmaxf(top, partial_top[(item + p) * num_heads + head]);
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2)
    top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, offset));

  constexpr int QUADS = (HD / 4 + 31) / 32;  // a lane's groups of four elements
  float acc[QUADS][4] = {}, sum = 0.f;
#pragma unroll 4
  for (int p = first + warp; p <= last; p += DECODE_WARPS) {
    const long long row = (item + p) * num_heads + head;
    const float factor = ex2(partial_top[row] - top);
    sum += factor * partial_sum[row];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      if (lane + 32 * i >= HD / 4) break;
      const float4 part = *(const float4*)(partial_out + row * HD + 4 * (lane + 32 * i));
      acc[i][0] += factor * part.x;
      acc[i][1] += factor * part.y;
      acc[i][2] += factor * part.z;
      acc[i][3] += factor * part.w;
    }
  }
#pragma unroll
  for (int i = 0; i < QUADS; ++i)
    if (lane + 32 * i < HD / 4)
      *(float4*)&s_out[warp][4 * (lane + 32 * i)] =
          make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  if (lane == 0) s_sum[warp] = sum;
  __syncthreads();

  sum = s_sum[0];
#pragma unroll
  for (int w = 1; w < DECODE_WARPS; ++w) sum += s_sum[w];
  const float sink = has_sinks ? sinks[head] : 0.f;
  float factor = normaliser(top, sum, has_sinks, sink);
  if (sizeof(C) == 1) factor *= value_scale[head / (num_heads / num_kv_heads)];
  T* row = out + query_start_loc[request] * out_stride + head * HD;
  for (int d = threadIdx.x; d < HD; d += 32 * DECODE_WARPS) {
    float value = s_out[0][d];
#pragma unroll
    for (int w = 1; w < DECODE_WARPS; ++w) value += s_out[w][d];
    row[d] = from_float<T>(value * factor);
  }
}
