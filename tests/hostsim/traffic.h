// Counts what the memory system would do for a kernel's accesses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"

namespace hostsim {

// Totals of one place in the code and one array. A request is what one warp asks for at once;
// `cost` counts 32-byte sectors of global memory, or passes over the 32 banks of shared memory.
struct Traffic {
  const char* file;  // null where only the code offset is known
  const char* array;  // null: shared memory
  uint64_t code_offset;
  int32_t line;
  int32_t write;
  uint64_t requests, bytes, cost, ideal_cost;
};

void begin_traffic();
// `offset` is from where memory is aligned; `array` null means shared memory.
void count_access(Place place, const char* array, uintptr_t offset, size_t size, bool write);
void end_block_traffic();

}  // namespace hostsim
