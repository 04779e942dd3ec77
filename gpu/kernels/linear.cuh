// What gemm.cu and gemv.cu share: the numbers of epilogues and silu.
#pragma once
#include "gpu.cuh"

constexpr int ADD = 1, SILU_MUL = 2;   // epilogues; 0 stores the sums as they are

KDEV float silu(float x) { return x / (1.0f + ex2(-1.4426950408889634f * x)); }
