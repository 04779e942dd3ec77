// The library's door: runs a grid block by block and says what went wrong.

#include "launch.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "checker.h"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;  // by the linker

namespace hostsim {

Launch launch;

namespace {

Fault fault;

void copy_text(char* to, size_t size, const char* from) {
  strncpy(to, from, size - 1);
  to[size - 1] = 0;
}

// Blocks may run in any order on a GPU, so the launch's order holds for them too.
std::vector<uint32_t> block_order(uint32_t num_blocks) {
  std::vector<uint32_t> order(num_blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (launch.order == Order::reverse) std::reverse(order.begin(), order.end());
  if (launch.order == Order::random)
    for (uint32_t i = num_blocks; i > 1; --i) std::swap(order[i - 1], order[random_number() % i]);
  return order;
}

}  // namespace

void record_fault(Place place, const char* kind, const char* format, va_list arguments) {
  fault = {};
  copy_text(fault.kind, sizeof fault.kind, kind);
  vsnprintf(fault.message, sizeof fault.message, format, arguments);
  if (place.site.file) {
    copy_text(fault.file, sizeof fault.file, place.site.file);
    fault.line = place.site.line;
  } else {
    fault.code_offset = (uint64_t)((const char*)place.pc - &__ehdr_start);
  }
  fault.block = block.index;
  if (current) {
    fault.thread_known = 1;
    fault.thread = current->index;
  }
}

}  // namespace hostsim

using namespace hostsim;

// Null if all went well.
extern "C" __attribute__((visibility("default"))) const Fault* hostsim_launch(const Launch* what) {
  launch = *what;
  preempting = launch.preempt;
  seed_random(launch.seed);
  const uint3 grid = launch.grid;
  block.num_threads = (int)(launch.block.x * launch.block.y * launch.block.z);
  begin_checks();
  bool ok = true;
  block.number = 0;
  for (uint32_t i : block_order(grid.x * grid.y * grid.z)) {
    block.index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    block.first_thread = block.number * (uint32_t)block.num_threads;
    open_shared_memory(launch.shared_bytes, launch.shared_limit);
    begin_block_checks();
    ok = run_block(launch.kernel, launch.args);
    if (!ok) break;
    end_block_checks();
    ++block.number;
  }
  end_checks();
  return ok ? nullptr : &fault;
}
