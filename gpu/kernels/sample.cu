// From logits to tokens: a draw from each row of logits, and log-probabilities, without sorting.
//
//   sample           temperature, min-p, top-k, top-p, then a draw; argmax where temperature is 0
//   token_logprobs   log-probability and rank of given tokens, and the k likeliest tokens
//
// logits float32 [rows, vocab], rows `stride` elements apart; one block of THREADS a row.
//
// Weights w = exp((logit - max) / temperature) are positive floats, whose bits order as they do. So
// the k-th largest weight, and the weight at which the mass reaches top_p, are found by a radix
// descent: a histogram of 11 bits, then of 11 and of 10 bits inside the bucket that was hit. Tokens
// that tie with the last one kept are kept too. Weights are computed anew in each pass with
// operations that round as the CPU's do, so that both backends keep the same tokens.
//
// All sums are of integers, which have no order: weights in fixed point, and for histograms counts
// and the bits below the bucket's. A row's result depends on that row alone and not on THREADS.
//
// Bytes moved: a row once for each pass, after the first from the L2 cache: one pass for argmax,
// 3 for top-k, 3 for top-p, 1 and 1/32 more for the draw. Log-probabilities take 2 passes, 4 more
// with k > 0, and 3 more when tokens tie with the k-th.
#include "gpu.cuh"

typedef unsigned long long u64;

constexpr int BUCKETS = 2048;
constexpr int LOW_BITS = 10;  // of the sum of the bits below a bucket's, kept in two words
// Fixed point: 2^20 weights of at most 1, the largest vocabulary, sum up within 64 bits.
constexpr int FIXED_BITS = 43;
constexpr int VOCAB_BITS = 20;
constexpr int MOST_TOP = 1024;

// ---- passes over a row ------------------------------------------------------------------------

// f(index, logit) for [begin, end), shared by `threads` threads; 16 bytes a load in the middle.
template <typename F>
KDEV void for_each(const float* row, int begin, int end, int thread, int threads, const F& f) {
  const int misaligned = (int)((u64)(row + begin) / 4 % 4);
  const int middle = min(begin + (4 - misaligned) % 4, end);
  if (begin + thread < middle) f(begin + thread, row[begin + thread]);
  const int packs = (end - middle) / 4;
  const Vec16* packed = (const Vec16*)(row + middle);
#pragma unroll 2
  for (int p = thread; p < packs; p += threads) {
    const Vec16 pack = packed[p];
#pragma unroll
    for (int i = 0; i < 4; ++i) f(middle + 4 * p + i, __uint_as_float(pack.u[i]));
  }
  const int rest = middle + 4 * packs + thread;
  if (rest < end) f(rest, row[rest]);
}

template <int THREADS, typename F>
KDEV void for_each_logit(const float* row, int vocab, const F& f) {
  for_each(row, 0, vocab, threadIdx.x, THREADS, f);
}

// ---- reductions over a block ------------------------------------------------------------------

KDEV u64 warp_sum(u64 x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL_MASK, x, offset);
  return x;
}

// Inclusive prefix sum over the lanes.
KDEV u64 warp_scan(u64 x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const u64 below = __shfl_up_sync(FULL_MASK, x, offset);
    if (lane >= offset) x += below;
  }
  return x;
}

struct Prefix {
  u64 before, total;
};

// The sum of x over the threads before this one, and over all of them.
template <int THREADS>
KDEV Prefix block_scan(u64 x) {
  constexpr int warps = THREADS / 32;
  SHARED(u64, sums, [warps]);
  const int warp = threadIdx.x / 32;
  const u64 inclusive = warp_scan(x);
  __syncthreads();  // the sums of an earlier call have been read
  if (threadIdx.x % 32 == 31) sums[warp] = inclusive;
  __syncthreads();
  Prefix prefix = {inclusive - x, 0};
#pragma unroll
  for (int w = 0; w < warps; ++w) {
    if (w < warp) prefix.before += sums[w];
    prefix.total += sums[w];
  }
  return prefix;
}

struct Best {
  float value;
  int index;  // -1: nothing is above -inf
};

KDEV Best better(Best a, Best b) {
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

// Lowest index of the largest logit; NaN is passed over.
template <int THREADS>
KDEV Best argmax(const float* row, int vocab) {
  constexpr int warps = THREADS / 32;
  SHARED(float, values, [warps]);
  SHARED(int, indices, [warps]);
  Best best = {NEG_INF, -1};
  for_each_logit<THREADS>(row, vocab, [&](int i, float x) { best = better(best, Best{x, i}); });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    best = better(best, Best{__shfl_xor_sync(FULL_MASK, best.value, offset),
                             __shfl_xor_sync(FULL_MASK, best.index, offset)});
  }
  if (threadIdx.x % 32 == 0) {
    values[threadIdx.x / 32] = best.value;
    indices[threadIdx.x / 32] = best.index;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < warps; ++w) best = better(best, Best{values[w], indices[w]});
  return best;
}

// ---- weights ----------------------------------------------------------------------------------

// e**x for x in [-87, 0], bit for bit as rawpaged/cpu/floats.py: no operation may be fused.
KDEV float exp_as_cpu(float x) {
  const float n = floorf(__fadd_rn(__fmul_rn(x, 1.44269504f), 0.5f));
  float r = __fsub_rn(x, __fmul_rn(n, 0.693145752f));
  r = __fsub_rn(r, __fmul_rn(n, 1.42860677e-6f));
  float p = 1.9875691500e-4f;  // Cephes expf
  p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
  return __fmul_rn(p, __uint_as_float((unsigned)((int)n + 127) << 23));
}

// Bits of exp(scaled), 0 for what is too small to matter and for NaN.
KDEV unsigned weight_bits(float scaled) {
  return scaled >= -87.0f ? __float_as_uint(exp_as_cpu(scaled)) : 0u;
}

// significands * 2^-23 * 2^(exponent of the weight `bits`), in fixed point, rounded down.
KDEV u64 fixed_mass(unsigned bits, u64 significands) {
  const int shift = (int)(bits >> 23) - 127 - 23 + FIXED_BITS;
  if (shift >= 0) return significands << shift;
  return shift > -64 ? significands >> -shift : 0;
}

KDEV u64 significand(unsigned bits) { return (bits & 0x7fffffu) | 0x800000u; }

KDEV u64 fixed_weight(unsigned bits) { return bits ? fixed_mass(bits, significand(bits)) : 0; }

// ---- radix descent ----------------------------------------------------------------------------

// Shared memory of a descent; the kernels own it, as each instance of a function would have its own.
struct Histogram {
  unsigned count[BUCKETS];
  unsigned high[BUCKETS];  // sums of the bits below a bucket's, in two words
  unsigned low[BUCKETS];
  u64 hit[2];  // the bucket found, and the amount still needed in it
};

// Fixed-point mass of the weights counted in a bucket, whose smallest is `first`.
KDEV u64 bucket_mass(const Histogram& histogram, int bucket, unsigned first) {
  const u64 below = ((u64)histogram.high[bucket] << LOW_BITS) + histogram.low[bucket];
  return fixed_mass(first, histogram.count[bucket] * significand(first) + below);
}

struct Cut {
  unsigned bits;    // keys >= bits are kept
  unsigned needed;  // how many keys equal to `bits` it takes (when counting)
  unsigned held;    // how many there are
};

// Count the keys in [first, last] at or above `least` into buckets of 2^shift keys.
template <int THREADS, bool BY_MASS, typename Key>
KDEV void fill(Histogram& histogram, const float* row, int vocab, const Key& key, unsigned least,
               unsigned first, unsigned last, int shift) {
  for (int b = threadIdx.x; b < BUCKETS; b += THREADS) {
    histogram.count[b] = 0;
    histogram.high[b] = 0;
    histogram.low[b] = 0;
  }
  __syncthreads();
  for_each_logit<THREADS>(row, vocab, [&](int i, float x) {
    const unsigned bits = key(i, x);
    if (bits < least || bits - first > last - first) return;
    const unsigned bucket = (bits - first) >> shift;
    atomicAdd(&histogram.count[bucket], 1u);
    if (BY_MASS && shift > 0) {
      const unsigned below = bits & ((1u << shift) - 1);
      atomicAdd(&histogram.low[bucket], below & ((1u << LOW_BITS) - 1));
      if (shift > LOW_BITS) atomicAdd(&histogram.high[bucket], below >> LOW_BITS);
    }
  });
  __syncthreads();
}

// The smallest key kept: the largest keys until their number reaches `amount` or, BY_MASS, until
// the weights that they are the bits of reach the share `amount` of all. Keys below `least` (> 0)
// do not count. When there are too few, all of them are kept.
template <int THREADS, bool BY_MASS, typename Key>
KDEV Cut descend(Histogram& histogram, const float* row, int vocab, unsigned least, double amount,
                 const Key& key) {
  constexpr int own = BUCKETS / THREADS;
  unsigned first = 0, last = 0xffffffffu, held = 0;
  u64 needed = 0;
  for (int level = 0; level < 3; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
    fill<THREADS, BY_MASS>(histogram, row, vocab, key, least, first, last, shift);
    // Threads take the buckets from the top, `own` each.
    const auto amount_in = [&](int bucket) -> u64 {
      const unsigned count = histogram.count[bucket];
      if (!BY_MASS || count == 0) return count;
      return bucket_mass(histogram, bucket, first + ((unsigned)bucket << shift));
    };
    const int top = BUCKETS - 1 - (int)threadIdx.x * own;
    u64 mine = 0;
    for (int j = 0; j < own; ++j) mine += amount_in(top - j);
    const Prefix prefix = block_scan<THREADS>(mine);
    if (level == 0) {
      const double wanted = BY_MASS ? ceil(amount * (double)prefix.total) : amount;
      needed = max((u64)wanted, (u64)1);
    }
    if (BY_MASS && level > 0) needed = min(needed, prefix.total);  // parts were rounded down
    if (needed > prefix.total || prefix.total == 0) break;
    if (prefix.before < needed && needed <= prefix.before + mine) {
      u64 left = needed - prefix.before;
      int bucket = top;
      while (left > amount_in(bucket)) left -= amount_in(bucket--);
      histogram.hit[0] = bucket;
      histogram.hit[1] = left;
    }
    __syncthreads();
    first += (unsigned)histogram.hit[0] << shift;
    last = first + ((1u << shift) - 1);
    needed = histogram.hit[1];
    held = histogram.count[histogram.hit[0]];
    __syncthreads();  // before the next level clears
  }
  return Cut{max(first, least), (unsigned)needed, held};
}

// ---- sampling ---------------------------------------------------------------------------------

// 53 random bits: Philox4x32-10 (Salmon et al. 2011) under `seed` at (position, sample_index).
KDEV u64 random_bits(u64 seed, unsigned position, unsigned sample_index) {
  unsigned c0 = position, c1 = sample_index, c2 = 0, c3 = 0;
  unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = (u64)0xD2511F53u * c0, product1 = (u64)0xCD9E8D57u * c2;
    c0 = (unsigned)(product1 >> 32) ^ c1 ^ k0;
    c1 = (unsigned)product1;
    c2 = (unsigned)(product0 >> 32) ^ c3 ^ k1;
    c3 = (unsigned)product0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return ((u64)c0 << 21) | (c1 >> 11);
}

// The token at which the running sum of kept weights, by id, first exceeds random / 2^53 of all.
//
// Sums of 32 pieces tell in which one it is; then of 32 pieces of that one, until 32 tokens are
// left. -1 when no weight is kept.
template <int THREADS, typename Key>
KDEV int draw(const float* row, int vocab, unsigned least, u64 random, const Key& key) {
  constexpr int pieces = 32;
  SHARED(u64, sums, [pieces]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto mass_of = [&](int i, float x) -> u64 {
    const unsigned bits = key(i, x);
    return bits >= least ? fixed_weight(bits) : 0;
  };
  int begin = 0, end = vocab;
  u64 target = 0;
  int size;
  do {
    size = ((end - begin + pieces - 1) / pieces + 31) / 32 * 32;
    for (int piece = warp; piece < pieces; piece += THREADS / 32) {
      const int from = min(begin + piece * size, end);
      u64 sum = 0;
      for_each(row, from, min(from + size, end), lane, 32,
               [&](int i, float x) { sum += mass_of(i, x); });
      sum = warp_sum(sum);
      if (lane == 0) sums[piece] = sum;
    }
    __syncthreads();
    if (end - begin == vocab) {
      u64 total = 0;
      for (int piece = 0; piece < pieces; ++piece) total += sums[piece];
      if (total == 0) return -1;
      target = __umul64hi(total, random << 11);
    }
    int piece = 0;
    while (target >= sums[piece]) target -= sums[piece++];
    begin += piece * size;
    end = min(begin + size, end);
    __syncthreads();  // before the next sums
  } while (size > 32);
  const int i = begin + lane;
  const u64 mass = i < end ? mass_of(i, row[i]) : 0;
  const u64 running = warp_scan(mass);
  return begin + __ffs((int)__ballot_sync(FULL_MASK, running > target)) - 1;
}

template <int THREADS>
KDEV void sample(int* out, const float* logits, const float* temperature, const int* top_k,
                 const float* top_p, const float* min_p, const u64* seeds,
                 const unsigned* positions, const unsigned* sample_indices, int vocab,
                 long long stride) {
  const int r = blockIdx.x;
  const float* row = logits + r * stride;
  SHARED(Histogram, histogram, [1]);
  const Best best = argmax<THREADS>(row, vocab);
  const float heat = temperature[r];
  int token = best.index;
  if (heat != 0.0f && token >= 0) {
    const auto key = [=](int, float x) -> unsigned {
      return weight_bits(__fdiv_rn(__fsub_rn(x, best.value), heat));
    };
    // min_p is a share of the largest weight, which is 1; weight 0 is never drawn.
    unsigned least = max(__float_as_uint(min_p[r]), 1u);
    if (0 < top_k[r] && top_k[r] < vocab) {
      least = descend<THREADS, false>(histogram[0], row, vocab, least, top_k[r], key).bits;
    }
    if (top_p[r] < 1.0f) {
      least = descend<THREADS, true>(histogram[0], row, vocab, least, top_p[r], key).bits;
    }
    const u64 random = random_bits(seeds[r], positions[r], sample_indices[r]);
    token = draw<THREADS>(row, vocab, least, random, key);
  }
  if (threadIdx.x == 0) out[r] = token;
}

// ---- log-probabilities ------------------------------------------------------------------------

// Unsigned integers in the order of the floats; NaN below -inf, both zeros equal, none is 0.
KDEV unsigned ordered_bits(float x) {
  if (!(x == x)) return 1u;
  const unsigned bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Lower ids have higher keys, spread over all buckets.
KDEV unsigned ordered_id(int id) {
  return (((1u << VOCAB_BITS) - 1 - (unsigned)id) << (32 - VOCAB_BITS)) | 1u;
}

// The k likeliest tokens of a row, likeliest first, ties by lower id; 0 < k <= MOST_TOP, vocab.
template <int THREADS, typename Logprob>
KDEV void top_tokens(int* ids, float* logprobs, const float* row, int vocab, int k,
                     const Logprob& logprob) {
  SHARED(int, held_ids, [MOST_TOP]);
  SHARED(unsigned, held_keys, [MOST_TOP]);
  SHARED(int, held, [1]);
  SHARED(Histogram, histogram, [1]);
  const auto by_value = [](int, float x) -> unsigned { return ordered_bits(x); };
  const Cut cut = descend<THREADS, false>(histogram[0], row, vocab, 1u, k, by_value);
  unsigned least_id = 0;
  if (cut.held > cut.needed) {
    const auto by_id = [=](int i, float x) -> unsigned {
      return ordered_bits(x) == cut.bits ? ordered_id(i) : 0u;
    };
    least_id = descend<THREADS, false>(histogram[0], row, vocab, 1u, cut.needed, by_id).bits;
  }
  if (threadIdx.x == 0) held[0] = 0;
  __syncthreads();
  for_each_logit<THREADS>(row, vocab, [&](int i, float x) {
    const unsigned key = ordered_bits(x);
    if (key < cut.bits || (key == cut.bits && ordered_id(i) < least_id)) return;
    const int place = atomicAdd(&held[0], 1);
    held_ids[place] = i;
    held_keys[place] = key;
  });
  __syncthreads();
  for (int j = threadIdx.x; j < k; j += THREADS) {
    int place = 0;
    for (int other = 0; other < k; ++other) {
      place += held_keys[other] > held_keys[j] ||
               (held_keys[other] == held_keys[j] && held_ids[other] < held_ids[j]);
    }
    ids[place] = held_ids[j];
    logprobs[place] = logprob(row[held_ids[j]]);
  }
}

template <int THREADS>
KDEV void token_logprobs(float* chosen, int* ranks, int* top_ids, float* top_logprobs,
                         const float* logits, const int* token_ids, int vocab, int k,
                         long long stride) {
  const int r = blockIdx.x;
  const float* row = logits + r * stride;
  const float most = row[max(argmax<THREADS>(row, vocab).index, 0)];
  const int token = token_ids[r];
  const bool known = 0 <= token && token < vocab;
  const float target = known ? row[token] : 0.0f;
  u64 mass = 0, likelier = 0;
  for_each_logit<THREADS>(row, vocab, [&](int, float x) {
    mass += fixed_weight(weight_bits(__fsub_rn(x, most)));
    likelier += x > target;
  });
  const u64 total = block_scan<THREADS>(mass).total;
  const u64 rank = 1 + block_scan<THREADS>(likelier).total;
  const double log_total = log((double)total) - FIXED_BITS * 0.6931471805599453;
  const auto logprob = [=](float x) -> float {
    return (float)((double)__fsub_rn(x, most) - log_total);
  };
  if (threadIdx.x == 0) {
    chosen[r] = known ? logprob(target) : __uint_as_float(0x7fc00000u);
    ranks[r] = known ? (int)rank : 0;
  }
  if (k > 0) {
    const long long offset = (long long)r * k;
    top_tokens<THREADS>(top_ids + offset, top_logprobs + offset, row, vocab, k, logprob);
  }
}
