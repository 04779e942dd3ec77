// out[i] = x[rows[i]], copied in words W of 2, 4 or 16 bytes.
//
// A row has `words` words; rows of out and x lie out_stride and x_stride words apart. Block (i, y)
// copies part y of row i. Bytes moved: the rows once in and once out.
#include "gpu.cuh"

template <typename W>
KDEV void gather_rows(W* out, const W* x, const int* rows, int words, long long out_stride,
                      long long x_stride) {
  W* to = out + blockIdx.x * out_stride;
  const W* from = x + rows[blockIdx.x] * x_stride;
  const int step = (int)(gridDim.y * blockDim.x);
  for (int i = (int)(blockIdx.y * blockDim.x + threadIdx.x); i < words; i += step) {
    to[i] = from[i];
  }
}
