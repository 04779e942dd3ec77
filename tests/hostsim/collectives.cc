// Barriers, and what the lanes of a warp do together.

#include <cstring>
#include <vector>

#include "block.h"
#include "scheduler.h"

namespace hostsim {

namespace {

struct Warp {
  unsigned existing, exited, waiting;  // lanes
};

// A result and how many lanes may still look at it.
struct Exchange : Lanes {
  int holders = 0;
};

std::vector<Warp> warps;
std::vector<Exchange*> exchanges;
int num_alive, num_at_barrier, barrier_count;

void wait_in(State state, const char* call, Site site, unsigned mask) {
  current->state = state;
  current->call = call;
  current->site = site;
  current->mask = mask;
}

void drop_held() {
  if (!current->held) return;
  --const_cast<Exchange*>(static_cast<const Exchange*>(current->held))->holders;
  current->held = nullptr;
}

Fiber* warp_fibers(int warp) { return &fibers[warp * kWarpSize]; }

void release_block_barrier() {
  barrier_count = 0;
  for (int i = 0; i < block.num_threads; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.state != State::at_block_barrier) continue;
    barrier_count += fiber.predicate;
    ++fiber.barriers;
    fiber.warp_barriers = 1;
    memset(fiber.known, 0, sizeof fiber.known);
    make_ready(fiber);
  }
  num_at_barrier = 0;
}

// All threads are at a barrier; fails if they are at two.
void check_one_barrier(const char* name, Site site) {
  for (int i = 0; i < block.num_threads; ++i) {
    const Fiber& other = fibers[i];
    if (other.state != State::at_block_barrier) continue;
    if (other.site.line != site.line || strcmp(other.site.file, site.file) != 0)
      fail({nullptr, site}, "divergent-barrier",
           "%s by thread %d, but thread %d is in %s at %s:%d", name, current->number, i,
           other.call, other.site.file, other.site.line);
  }
}

// Fails if the current lane and a waiting one name each other but mean different calls.
void check_agreement(const Fiber& other, unsigned mask) {
  if (!(other.mask >> current->lane & 1)) return;
  if (other.mask != mask)
    fail({nullptr, current->site}, "warp",
         "%s with mask %08x, but lane %d waits in %s with mask %08x at %s:%d", current->call, mask,
         other.lane, other.call, other.mask, other.site.file, other.site.line);
  if (other.call != current->call && strcmp(other.call, current->call) != 0)
    fail({nullptr, current->site}, "warp", "%s, but lane %d of the mask waits in %s at %s:%d",
         current->call, other.lane, other.call, other.site.file, other.site.line);
}

// True for the lane of the mask that comes last. Lanes that the block lacks do not count.
bool meet(unsigned mask, const char* call, Site site) {
  Warp& warp = warps[current->warp];
  mask &= warp.existing;
  wait_in(State::in_warp, call, site, mask);
  if (!(mask >> current->lane & 1))
    fail({nullptr, site}, "warp", "%s: the calling lane %d is not in mask %08x", call,
         current->lane, mask);
  if (mask & warp.exited)
    fail({nullptr, site}, "warp", "%s: mask %08x names lanes %08x, which have exited", call, mask,
         mask & warp.exited);
  warp.waiting |= 1u << current->lane;
  if ((warp.waiting & mask) != mask) return false;
  bool complete = true;
  for (int i = 0; i < kWarpSize; ++i) {
    if (!(mask >> i & 1)) continue;
    const Fiber& other = warp_fibers(current->warp)[i];
    check_agreement(other, mask);
    complete = complete && other.mask == mask;
  }
  if (complete) warp.waiting &= ~mask;
  return complete;
}

Exchange* free_exchange() {
  for (Exchange* exchange : exchanges)
    if (exchange->holders == 0) return exchange;
  exchanges.push_back(new Exchange);
  return exchanges.back();
}

// A lane that exits while others wait for it will never come.
void check_exit() {
  for (int i = 0; i < kWarpSize; ++i) {
    const Fiber& other = warp_fibers(current->warp)[i];
    if (other.number >= block.num_threads || other.state != State::in_warp) continue;
    if (other.mask >> current->lane & 1)
      fail({nullptr, other.site}, "warp", "lane %d waits in %s for lane %d, which has exited",
           other.lane, other.call, current->lane);
  }
}

}  // namespace

void begin_collectives() {
  num_alive = block.num_threads;
  num_at_barrier = 0;
  warps.assign(kMaxThreads / kWarpSize, Warp{});
  for (int i = 0; i < block.num_threads; ++i)
    warps[i / kWarpSize].existing |= 1u << (i % kWarpSize);
  for (Exchange* exchange : exchanges) exchange->holders = 0;
}

int exit_thread() {
  drop_held();
  check_exit();
  current->state = State::done;
  warps[current->warp].exited |= 1u << current->lane;
  if (--num_alive > 0 && num_at_barrier == num_alive) release_block_barrier();
  return num_alive;
}

int block_barrier(bool predicate, const char* name, Site site) {
  drop_held();
  wait_in(State::at_block_barrier, name, site, 0);
  current->predicate = predicate;
  if (++num_at_barrier == num_alive) {
    check_one_barrier(name, site);
    release_block_barrier();
  }
  run_others();
  return barrier_count;
}

void warp_barrier(unsigned mask, Site site) {
  drop_held();
  if (meet(mask, "__syncwarp", site)) {
    // Each lane of the mask now knows all that any of them knew, and all that they have done.
    Fiber* lanes = warp_fibers(current->warp);
    const unsigned members = current->mask;
    uint16_t known[kWarpSize] = {};
    for (int i = 0; i < kWarpSize; ++i) {
      if (!(members >> i & 1)) continue;
      for (int k = 0; k < kWarpSize; ++k)
        if (lanes[i].known[k] > known[k]) known[k] = lanes[i].known[k];
      known[i] = lanes[i].warp_barriers++;
    }
    for (int i = 0; i < kWarpSize; ++i) {
      if (!(members >> i & 1)) continue;
      memcpy(lanes[i].known, known, sizeof known);
      make_ready(lanes[i]);
    }
  }
  run_others();
}

const Lanes& exchange(unsigned mask, const void* bytes, size_t size, const char* name, Site site) {
  static char slots[kMaxThreads][kSlotBytes];
  drop_held();
  memcpy(slots[current->number], bytes, size);
  if (meet(mask, name, site)) {
    Exchange* result = free_exchange();
    result->mask = current->mask;
    const int first = current->warp * kWarpSize;
    for (int i = 0; i < kWarpSize; ++i) {
      if (!(result->mask >> i & 1)) continue;
      memcpy(result->slot[i], slots[first + i], size);
      fibers[first + i].held = result;
      ++result->holders;
      make_ready(fibers[first + i]);
    }
  }
  run_others();
  return *current->held;
}

}  // namespace hostsim
