// State of the running block, shared by the parts of the runtime.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime.h"

namespace hostsim {

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 192 << 10;
constexpr size_t kArenaBytes = 512 << 10;  // shared memory of a block, with gaps between arrays

// Where something happened: the kernel's own line where known, else a code address.
struct Place {
  const void* pc;
  Site site;
};

enum class State : uint8_t { ready, at_block_barrier, in_warp, done };

// One cp.async; `bytes` is what the source held when it was issued.
struct AsyncCopy {
  unsigned char* target;
  const void* source;
  unsigned char bytes[16];
  int group;
  Site site;
};

struct Fiber {
  void* stack_pointer;
  char* stack;
  uint3 index;
  int number, lane, warp;
  State state;

  // What it waits in.
  const char* call;
  Site site;
  unsigned mask;
  bool predicate;

  const Lanes* held;  // result of its last collective

  // Barriers passed since the block began; warp barriers since the last of those, from 1 on; and
  // up to which of its warp barriers each lane of the warp is known to this one.
  uint16_t barriers, warp_barriers;
  uint16_t known[kWarpSize];

  std::vector<AsyncCopy> copies;
  int copy_group;
};

struct Block {
  uint3 index;
  uint32_t number;       // in the order in which blocks run
  uint32_t first_thread;  // number of its thread 0 in the grid
  int num_threads;
};

extern Block block;
extern std::vector<Fiber> fibers;
extern Fiber* current;  // null outside of kernels
extern bool preempting;

[[noreturn]] void fail(Place place, const char* kind, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// Seeded anew by each launch.
uint32_t random_number();
void seed_random(uint64_t seed);

// Lets another fiber run now and then, where the launch asked for that.
void maybe_preempt();

// Runs all threads of the block; false if one of them failed.
bool run_block(void (*kernel)(void**), void** args);

// Shared memory: [0, dynamic bytes) and behind it the static arrays as they are first used.
void open_shared_memory(size_t dynamic_bytes, size_t limit);
bool in_shared_arena(const void* address);

}  // namespace hostsim
