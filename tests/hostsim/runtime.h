// What the simulator's runtime offers to a kernel that runs on the host.
//
// A CUDA thread is a fiber; the fibers of one block take turns on one OS thread and change places
// only inside the calls below, so that everything between two calls is atomic.
#pragma once

#include <cstddef>
#include <cstdint>

#include <vector_types.h>

namespace hostsim {

constexpr int kWarpSize = 32;
constexpr size_t kSlotBytes = 64;

// Where a kernel called; in a default argument it names the caller's line.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// What each lane of a warp brought to a collective; valid until the lane's next collective.
struct Lanes {
  unsigned mask;
  char slot[kWarpSize][kSlotBytes];
};

// These do not change while a fiber runs, so the compiler may call them once.
uint3 thread_index() __attribute__((const));
uint3 block_index() __attribute__((const));
uint3 block_dim() __attribute__((const));
uint3 grid_dim() __attribute__((const));
int lane_index() __attribute__((const));

// Ends the launch with a fault of this kind at the site.
[[noreturn]] void fail_at(Site site, const char* kind, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// __syncthreads; returns for how many threads predicate was true.
int block_barrier(bool predicate, const char* name, Site site);
// __syncwarp: lanes of mask meet, and what they wrote is seen by the others.
void warp_barrier(unsigned mask, Site site);
// Lanes of mask meet and see each other's bytes; this orders no memory, as on a GPU.
const Lanes& exchange(unsigned mask, const void* bytes, size_t size, const char* name, Site site);

// Memory of this block. The static arrays are told apart by the address of a key.
unsigned char* dynamic_shared();
void* static_shared(const void* key, size_t size);

// Accesses that wrappers make for the kernel, and that no compiler can see.
void check_atomic(void* address, size_t size, Site site);
void check_shared_row(const void* address, Site site);
void memory_fence();

// cp.async: the target is poison until the thread waits for the copy's group.
void copy_async16(void* target, const void* source, bool pred, Site site);
void copy_commit();
void copy_wait(int groups_in_flight);

}  // namespace hostsim
