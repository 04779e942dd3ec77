// What one block may see of another: __threadfence and an atomic hand memory over.
#pragma once

#include <cstdint>

namespace hostsim {

// Something that a thread did, and when: after how many barriers of its block and of its warp.
struct Event {
  uint32_t thread;  // number in the grid + 1; 0: nothing happened
  uint16_t barriers, warp_barriers;
};

void begin_fences();
void begin_block_fences();

// The current thread updates this address atomically.
void hand_over(const void* address);
// Whether an event of another block was handed over to the current thread.
bool was_handed_over(const Event& event);

}  // namespace hostsim
