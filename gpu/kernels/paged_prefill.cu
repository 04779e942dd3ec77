// Attention of requests with several queries over a paged KV cache: causal over the cached prefix
// and the chunk, in tiles as FlashAttention-2 computes them.
//
// q, out        T[num_tokens, num_heads, HD], rows q_stride and out_stride elements apart
// keys, values  C[num_blocks, num_kv_heads, block_size, HD], block_size = 1 << block_shift >= 8
// tiles         i32[num_tiles, 4]: request, first row, number of rows, position of the request's
//               first query. Row r of a request and KV head is head r % group of query r / group,
//               so that no row of a tile is wasted whatever the group.
//
// Grid: (num_tiles, num_kv_heads), 128 threads; a warp has 16 * MT rows and all KEYS keys of a
// step.
//
// Queries stay in shared memory. Keys and values have a buffer each, filled by cp.async through the
// block table: values arrive while the scores and the softmax are computed, the next keys while the
// values are multiplied. Bytes of a cache arrive in a buffer of their own, and each thread widens
// those that it fetched itself. Rows are padded by 16 bytes, so that ldmatrix meets no bank
// conflicts. Key tiles begin at multiples of KEYS counted from position 0, and a tile in which a
// row sees nothing does not change it; so a row's result does not depend on how the prompt was
// chunked.
//
// Bytes: (2 * sizeof(C) * keys seen + 2 * sizeof(T) * rows) * HD a tile and KV head. FLOPs: 4 * HD
// a row and visible key. Expected: at most 255 registers without spills; shared memory
// ((64 * MT + 2 * KEYS) * (HD + 8)) * 2 bytes, and KEYS * HD for a cache of bytes.
//
// FlashAttention-2: Dao, 2023, arXiv:2307.08691.
#include "attention.cuh"

constexpr int PREFILL_THREADS = 128;

// A warp's rows: of block m of 16, row lane / 4 (first two of four) and 8 more.
template <int HD, int MT>
struct PrefillState {
  float acc[MT][HD / 8][4];
  float top[MT][2], sum[MT][2];
  int position[MT][2];
};

// Keys or values of KEYS tokens in shared memory, elements of T in rows of HD + 8.
template <typename T, typename C, int HD, int KEYS>
struct KeyTiles {
  static constexpr int LD = HD + 8;
  static constexpr int IN_CHUNK = 16 / sizeof(C), CHUNKS = HD / IN_CHUNK;

  const int* block_table;
  unsigned char* bytes;  // KEYS * HD, where C is a byte
  int begin, end, head, num_kv_heads, block_shift;

  // Start copying tokens [first, first + KEYS); zeros for those outside of [begin, end).
  KDEV void fetch(T* tile, const C* cache, int first) const {
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += PREFILL_THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS, token = first + row;
      const bool visible = token >= begin && token < end;
      const C* from = cache;
      if (visible)
        from += row_of<HD>(block_table[token >> block_shift], token, head, num_kv_heads,
                           block_shift) + chunk * IN_CHUNK;
      void* to = sizeof(C) == 1 ? (void*)(bytes + 16 * i) : (void*)(tile + row * LD + 8 * chunk);
      cp_async16(to, from, visible);
    }
    cp_async_commit();
  }

  // Wait for this thread's last fetch, which a barrier must make visible to others.
  KDEV void arrive(T* tile) const {
    cp_async_wait<0>();
    if constexpr (sizeof(C) == 1)
      for (int i = threadIdx.x; i < KEYS * CHUNKS; i += PREFILL_THREADS) {
        const Vec16 from = *(const Vec16*)(bytes + 16 * i);
        Vec16* to = (Vec16*)(tile + i / CHUNKS * LD + i % CHUNKS * IN_CHUNK);
        const int odd = i % CHUNKS / 4 % 2;  // these lanes begin with the other half: other banks
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          Vec16 wide;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const unsigned word = step == odd ? from.u[k / 2] : from.u[2 + k / 2];
            wide.u[k] = widen2<T>(k % 2 ? word >> 16 : word, (const C*)0);
          }
          to[step ^ odd] = wide;
        }
      }
  }
};

// scores[m][n] = Q K^T for the warp's rows and keys 8 * n to 8 * n + 7.
template <typename T, int HD, int MT, int KEYS>
KDEV void multiply_keys(float (&scores)[MT][KEYS / 8][4], const T* queries, const T* keys) {
  constexpr int LD = HD + 8;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < HD; k += 16) {
    unsigned a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
      ldmatrix_x4(a[m], queries + (16 * m + (lane & 15)) * LD + k + (lane >> 4) * 8);
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4(b, keys + (16 * n + (lane & 7) + (lane >> 4) * 8) * LD + k +
                         ((lane >> 3) & 1) * 8);
      const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_m16n8k16(scores[m][2 * n], a[m], first, (const T*)0);
        mma_m16n8k16(scores[m][2 * n + 1], a[m], second, (const T*)0);
      }
    }
  }
}

// acc += P V, weights as A fragments.
template <typename T, int HD, int MT, int KEYS>
KDEV void multiply_values(PrefillState<HD, MT>& state, const unsigned (&weights)[MT][KEYS / 8][2],
                          const T* values) {
  constexpr int LD = HD + 8;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
    for (int n = 0; n < HD / 16; ++n) {
      unsigned b[4];
      ldmatrix_x4_trans(b, values + (16 * k + (lane & 15)) * LD + 16 * n + (lane >> 4) * 8);
      const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const unsigned a[4] = {weights[m][2 * k][0], weights[m][2 * k][1],
                               weights[m][2 * k + 1][0], weights[m][2 * k + 1][1]};
        mma_m16n8k16(state.acc[m][2 * n], a, first, (const T*)0);
        mma_m16n8k16(state.acc[m][2 * n + 1], a, second, (const T*)0);
      }
    }
}

// Online softmax over the keys from `first` on; with `masked` some may be invisible to some rows.
template <typename T, int HD, int MT, int KEYS>
KDEV void weigh(PrefillState<HD, MT>& state, unsigned (&weights)[MT][KEYS / 8][2],
                float (&scores)[MT][KEYS / 8][4], int first, bool masked, int window,
                ScoreMap map) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int last_seen = state.position[m][i], first_seen = first_visible(last_seen, window);
      float most = NEG_INF;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = first + 8 * n + 2 * t + j;
          float& x = scores[m][n][2 * i + j];
          x = exponent_of(x, map);
          if (masked && (key > last_seen || key < first_seen)) x = NEG_INF;
          most = fmaxf(most, x);
        }
      most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
      most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
      const float top = fmaxf(state.top[m][i], most), base = finite_top(top);
      const float shrink = ex2(state.top[m][i] - base);
      state.top[m][i] = top;
      float sum = state.sum[m][i] * shrink;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
        float low, high;
        weights[m][n][i] = pack2(ex2(scores[m][n][2 * i] - base),
                                 ex2(scores[m][n][2 * i + 1] - base), (const T*)0);
        // The sum is over weights as they are multiplied, rounded to T.
        unpack2(low, high, weights[m][n][i], (const T*)0);
        sum += low + high;
      }
      state.sum[m][i] = sum;
#pragma unroll
      for (int n = 0; n < HD / 8; ++n) {
        state.acc[m][n][2 * i] *= shrink;
        state.acc[m][n][2 * i + 1] *= shrink;
      }
    }
}

// One step of a warp, from the key tile to its weights; false where none of its rows sees a key.
template <typename T, int HD, int MT, int KEYS>
KDEV bool score_tile(PrefillState<HD, MT>& state, unsigned (&weights)[MT][KEYS / 8][2],
                     const T* queries, const T* keys, int first, int first_position,
                     int last_position, int window, ScoreMap map) {
  const int last = first + KEYS - 1, out_of_all = first_visible(first_position, window);
  if (first > last_position || last < out_of_all) return false;
  float scores[MT][KEYS / 8][4] = {};
  multiply_keys<T, HD, MT, KEYS>(scores, queries, keys);
  const bool masked = last > first_position || first < first_visible(last_position, window);
  weigh<T, HD, MT, KEYS>(state, weights, scores, first, masked, window, map);
  return true;
}

// The warp's rows, normalised, into its part of the query tile in shared memory; sinks are those of
// the KV head's group.
template <typename T, int HD, int MT>
KDEV void stage_output(T* tile, const PrefillState<HD, MT>& state, const float* sinks,
                       bool has_sinks, int first_row, int group, float value_factor) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * m + 8 * i + g;
      float sum = state.sum[m][i];
      sum += __shfl_xor_sync(FULL_MASK, sum, 1);
      sum += __shfl_xor_sync(FULL_MASK, sum, 2);
      const float sink = has_sinks ? sinks[(first_row + row) % group] : 0.f;
      const float factor = normaliser(state.top[m][i], sum, has_sinks, sink) * value_factor;
#pragma unroll
      for (int n = 0; n < HD / 8; ++n)
        *(unsigned*)(tile + row * (HD + 8) + 8 * n + 2 * t) =
            pack2(state.acc[m][n][2 * i] * factor, state.acc[m][n][2 * i + 1] * factor,
                  (const T*)0);
    }
}

template <typename T, typename C, int HD, int MT, int KEYS>
KDEV void paged_prefill(T* out, const T* q, const C* keys, const C* values,
                        const int* block_tables, const int* query_start_loc, const int* tiles,
                        const float* key_scale, const float* value_scale, const float* sinks,
                        int has_sinks, int num_heads, int num_kv_heads, int block_shift,
                        int max_blocks, long long q_stride, long long out_stride, float scale,
                        float soft_cap, int window) {
  constexpr int LD = HD + 8, ROWS = 64 * MT, CHUNKS = HD / 8;
  DYN_SMEM(smem);
  T* s_q = (T*)smem;
  T* s_k = s_q + ROWS * LD;
  T* s_v = s_k + KEYS * LD;
  const int request = tiles[4 * blockIdx.x], first_row = tiles[4 * blockIdx.x + 1];
  const int num_rows = tiles[4 * blockIdx.x + 2], start = tiles[4 * blockIdx.x + 3];
  const int group = num_heads / num_kv_heads, kv_head = blockIdx.y;
  const long long first_token = query_start_loc[request];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warp_row = warp * 16 * MT;
  const auto row_offset = [&](int row, long long stride) {
    const int r = first_row + row;
    return (first_token + r / group) * stride + (kv_head * group + r % group) * HD;
  };

  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += PREFILL_THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool used = row < num_rows;
    cp_async16(s_q + row * LD + 8 * chunk, used ? q + row_offset(row, q_stride) + 8 * chunk : q,
               used);
  }
  const int first_position = start + first_row / group;
  const int end = start + (first_row + num_rows - 1) / group + 1;
  const KeyTiles<T, C, HD, KEYS> kv = {block_tables + (long long)request * max_blocks,
                                       (unsigned char*)(s_v + KEYS * LD),
                                       first_visible(first_position, window), end, kv_head,
                                       num_kv_heads, block_shift};
  int first = kv.begin / KEYS * KEYS;
  kv.fetch(s_k, keys, first);

  PrefillState<HD, MT> state = {};
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int row = min(warp_row + 8 * i + (lane >> 2), num_rows - 1);  // rows past the end: as it
    state.top[i / 2][i % 2] = NEG_INF;
    state.position[i / 2][i % 2] = start + (first_row + row) / group;
  }
  const bool active = warp_row < num_rows;
  const int warp_first = start + (first_row + warp_row) / group;
  const int warp_last = min(end - 1, start + (first_row + warp_row + 16 * MT - 1) / group);
  const ScoreMap map = score_map(sizeof(C) == 1 ? scale * key_scale[kv_head] : scale, soft_cap);

  for (; first < end; first += KEYS) {
    unsigned weights[MT][KEYS / 8][2];
    kv.arrive(s_k);
    __syncthreads();  // the keys are there, and the values of the last step are done with
    kv.fetch(s_v, values, first);
    const bool seen = active && score_tile<T, HD, MT, KEYS>(state, weights, s_q + warp_row * LD,
                                                            s_k, first, warp_first, warp_last,
                                                            window, map);
    kv.arrive(s_v);
    __syncthreads();  // the values are there, and the keys are done with
    if (first + KEYS < end) kv.fetch(s_k, keys, first + KEYS);
    if (seen) multiply_values<T, HD, MT, KEYS>(state, weights, s_v);
  }
  if (!active) return;
  stage_output<T>(s_q + warp_row * LD, state, sinks + kv_head * group, has_sinks,
                  first_row + warp_row, group, sizeof(C) == 1 ? value_scale[kv_head] : 1.f);
  __syncwarp();
  for (int i = lane; i < 16 * MT * CHUNKS; i += 32) {
    const int row = warp_row + i / CHUNKS, chunk = i % CHUNKS;
    if (row < num_rows)
      *(Vec16*)(out + row_offset(row, out_stride) + 8 * chunk) =
          *(const Vec16*)(s_q + row * LD + 8 * chunk);
  }
}
