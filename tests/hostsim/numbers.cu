// What CUDA's names compute on the host, one group of them a kernel.
#include "gpu.cuh"

extern "C" __global__ void convert(const float* x, float* via_bf16, float* via_half, float* via_fp8,
                                   unsigned* fp8, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  via_bf16[i] = to_float(from_float<bf16>(x[i]));
  via_half[i] = to_float(from_float<half>(x[i]));
  const __nv_fp8_storage_t byte = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
  fp8[i] = byte;
  via_fp8[i] = to_float(half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}

// Rows of 18 results a lane, named in test_numbers.py.
extern "C" __global__ void collect(const int* x, int* results) {
  const int lane = threadIdx.x, value = x[lane];
  const unsigned low_half = 0x0000ffffu;
  int* row = results + lane * 18;
  row[0] = __shfl_sync(FULL_MASK, value, 3, 8);
  row[1] = __shfl_xor_sync(FULL_MASK, value, 5);
  row[2] = __shfl_down_sync(FULL_MASK, value, 3, 16);
  row[3] = __shfl_up_sync(FULL_MASK, value, 3, 16);
  row[4] = (int)__ballot_sync(FULL_MASK, value > 0);
  row[5] = __any_sync(FULL_MASK, value > 90);
  row[6] = __all_sync(FULL_MASK, value > -100);
  row[7] = __reduce_add_sync(FULL_MASK, value);
  row[8] = __reduce_min_sync(FULL_MASK, value);
  row[9] = __reduce_max_sync(FULL_MASK, value);
  row[10] = (int)__reduce_or_sync(FULL_MASK, 1u << lane);
  row[11] = (int)__match_any_sync(FULL_MASK, value % 3);
  row[12] = lane < 16 ? __reduce_add_sync(low_half, value) : 0;
  row[13] = __syncthreads_count(value > 0);
  row[14] = __syncthreads_or(value > 90);
  row[15] = __syncthreads_and(value > -100);
  row[16] = (int)__float_as_uint(__shfl_xor_sync(FULL_MASK, (float)value, 1));
  row[17] = (int)(__shfl_xor_sync(FULL_MASK, value * 4294967296ll, 1) >> 32);
}

extern "C" __global__ void count_bits(const unsigned* x, unsigned* results) {
  const unsigned value = x[threadIdx.x];
  unsigned* row = results + threadIdx.x * 8;
  row[0] = __popc(value);
  row[1] = __clz((int)value);
  row[2] = __ffs((int)value);
  row[3] = __brev(value);
  row[4] = __umulhi(value, 0xdeadbeefu);
  row[5] = (unsigned)__umul64hi((unsigned long long)value << 32, 0xdeadbeef12345678ull);
  row[6] = (unsigned)__clzll((long long)value);
  row[7] = (unsigned)__popcll((unsigned long long)value << 7);
}

extern "C" __global__ void round_and_compare(const float* x, int* rounded, float* compared) {
  const float value = x[threadIdx.x];
  int* row = rounded + threadIdx.x * 4;
  row[0] = __float2int_rn(value);
  row[1] = __float2int_rz(value);
  row[2] = __float2int_rd(value);
  row[3] = __float2int_ru(value);
  compared[threadIdx.x * 2] = min(value, 1.0f);
  compared[threadIdx.x * 2 + 1] = max(value, 1.0f);
}

extern "C" __global__ void update_atomically(int* ints, unsigned* unsigneds, float* floats) {
  const int i = threadIdx.x;
  atomicAdd(&ints[0], i);
  atomicMin(&ints[1], i - 5);
  atomicMax(&ints[2], i);
  atomicCAS(&ints[3], i, i + 1);
  atomicOr(&unsigneds[0], 1u << i % 32);
  atomicAnd(&unsigneds[1], ~(1u << i % 32));
  atomicInc(&unsigneds[2], 9u);
  atomicExch(&unsigneds[3], 7u);
  atomicAdd(&floats[0], 0.5f);
}

// r[4] of every lane, plain and transposed, from four 8 x 8 matrices of 16-bit numbers.
extern "C" __global__ void load_fragments(const unsigned* matrices, unsigned* plain,
                                          unsigned* transposed, unsigned* moved) {
  SHARED(unsigned, s, [128]);
  for (int i = 0; i < 4; ++i) s[threadIdx.x * 4 + i] = matrices[threadIdx.x * 4 + i];
  __syncwarp();
  unsigned r[4], t[4];
  ldmatrix_x4(r, s + threadIdx.x * 4);
  ldmatrix_x4_trans(t, s + threadIdx.x * 4);
  for (int i = 0; i < 4; ++i) {
    plain[threadIdx.x * 4 + i] = r[i];
    transposed[threadIdx.x * 4 + i] = t[i];
    moved[threadIdx.x * 4 + i] = movmatrix_trans(r[i]);
  }
}
