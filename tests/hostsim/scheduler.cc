// Fibers, barriers and warp collectives: runs the threads of one block by turns.

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "block.h"
#include "launch.h"

#if !defined(__x86_64__)
#error "the simulator's stack switch is written for x86-64"
#endif

// Saves the callee-saved registers and the stack pointer, and goes on where `to` was saved.
extern "C" void hostsim_switch(void** from, void* to);
asm(R"(
.text
.globl hostsim_switch
.hidden hostsim_switch
.type hostsim_switch, @function
hostsim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace hostsim {

Block block;
std::vector<Fiber> fibers;
Fiber* current;
bool preempting;

namespace {

// Threads that can run, as a bit set: the next one is found in a few instructions.
class ReadySet {
 public:
  void clear() { memset(words_, 0, sizeof words_); }
  void add(int i) { words_[i / 64] |= 1ull << (i % 64); }
  void remove(int i) { words_[i / 64] &= ~(1ull << (i % 64)); }
  // The first member at or after i, going round; -1 if there is none.
  int from(int i) const {
    uint64_t word = words_[i / 64] & (~0ull << (i % 64));
    for (int n = 0, w = i / 64; n <= kWords; ++n) {
      if (word) return w * 64 + __builtin_ctzll(word);
      w = (w + 1) % kWords;
      word = words_[w];
    }
    return -1;
  }
  // The last member at or before i, going round; -1 if there is none.
  int back_from(int i) const {
    uint64_t word = words_[i / 64] & (~0ull >> (63 - i % 64));
    for (int n = 0, w = i / 64; n <= kWords; ++n) {
      if (word) return w * 64 + 63 - __builtin_clzll(word);
      w = (w + kWords - 1) % kWords;
      word = words_[w];
    }
    return -1;
  }

 private:
  static constexpr int kWords = kMaxThreads / 64;
  uint64_t words_[kWords];
};

struct Exchange : Lanes {
  int holders = 0;
};

ReadySet ready;
std::vector<Warp> warps;
std::vector<Exchange*> exchanges;
uint64_t random_state;
void* launch_stack_pointer;
void (*kernel_entry)(void**);
void** kernel_args;
int num_alive, num_at_barrier, barrier_count;
bool failed;

void make_ready(Fiber& fiber) {
  fiber.state = State::ready;
  ready.add(fiber.number);
}

void leave_launch() {
  void* dropped;
  hostsim_switch(&dropped, launch_stack_pointer);
}

int pick(int after) {
  const int n = block.num_threads;
  switch (launch.order) {
    case Order::forward:
      return ready.from((after + 1) % n);
    case Order::reverse:
      return ready.back_from((after + n - 1) % n);
    default:
      return ready.from((int)(random_number() % (uint32_t)n));
  }
}

[[noreturn]] void fail_stuck() {
  std::string waiting;
  int shown = 0;
  for (const Fiber& fiber : fibers) {
    if (fiber.number >= block.num_threads || fiber.state == State::done || shown++ == 4) continue;
    char text[256];
    snprintf(text, sizeof text, "; thread %d waits in %s at %s:%d", fiber.number, fiber.call,
             fiber.site.file, fiber.site.line);
    if (shown <= 4) waiting += text;
  }
  fail({nullptr, current->site}, "deadlock", "no thread can go on%s", waiting.c_str());
}

// Leaves the current fiber, which waits or is done, until it is ready again.
void run_others() {
  Fiber* me = current;
  if (num_alive == 0) leave_launch();
  const int next = pick(me->number);
  if (next < 0) fail_stuck();
  ready.remove(next);
  if (next == me->number) return;
  current = &fibers[next];
  hostsim_switch(&me->stack_pointer, current->stack_pointer);
}

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
void check_exit(const Fiber& fiber) {
  for (int i = 0; i < kWarpSize; ++i) {
    const Fiber& other = warp_fibers(fiber.warp)[i];
    if (other.number >= block.num_threads || other.state != State::in_warp) continue;
    if (other.mask >> fiber.lane & 1)
      fail({nullptr, other.site}, "warp", "lane %d waits in %s for lane %d, which has exited",
           other.lane, other.call, fiber.lane);
  }
}

void fiber_main() {
  kernel_entry(kernel_args);
  drop_held();
  Fiber& fiber = *current;
  check_exit(fiber);
  fiber.state = State::done;
  --num_alive;
  warps[fiber.warp].exited |= 1u << fiber.lane;
  if (num_alive > 0 && num_at_barrier == num_alive) release_block_barrier();
  run_others();
  __builtin_unreachable();
}

void make_fibers() {
  char* stacks = (char*)mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fibers.resize(kMaxThreads);
  warps.resize(kMaxThreads / kWarpSize);
  for (int i = 0; i < kMaxThreads; ++i) {
    fibers[i].stack = stacks + kStackBytes * i;
    fibers[i].number = i;
    fibers[i].lane = i % kWarpSize;
    fibers[i].warp = i / kWarpSize;
  }
}

void start_fiber(Fiber& fiber) {
  const unsigned i = fiber.number;
  const uint3 dim = launch.block;
  fiber.index = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
  fiber.held = nullptr;
  fiber.barriers = 0;
  fiber.warp_barriers = 1;
  memset(fiber.known, 0, sizeof fiber.known);
  fiber.copies.clear();
  fiber.copy_group = 0;
  warps[fiber.warp].existing |= 1u << fiber.lane;
  // The frame that hostsim_switch pops: six registers and where to return to. On entry to a
  // function the stack pointer is 8 short of a multiple of 16.
  void** top = (void**)(fiber.stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = (void*)fiber_main;
  for (int k = 0; k < 6; ++k) *--top = nullptr;
  fiber.stack_pointer = top;
  make_ready(fiber);
}

}  // namespace

uint3 thread_index() { return current->index; }
uint3 block_index() { return block.index; }
uint3 block_dim() { return launch.block; }
uint3 grid_dim() { return launch.grid; }
int lane_index() { return current->lane; }

uint32_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32);
}

void seed_random(uint64_t seed) { random_state = seed * 0x9E3779B97F4A7C15ull + 0x1234567; }

void fail(Place place, const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_fault(place, kind, format, arguments);
  va_end(arguments);
  failed = true;
  leave_launch();
  __builtin_unreachable();
}

void fail_at(Site site, const char* kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_fault({nullptr, site}, kind, format, arguments);
  va_end(arguments);
  failed = true;
  leave_launch();
  __builtin_unreachable();
}

void maybe_preempt() {
  if (!preempting || !current || (random_number() & 255) != 0) return;
  make_ready(*current);
  run_others();
}

int block_barrier(bool predicate, const char* name, Site site) {
  drop_held();
  wait_in(State::at_block_barrier, name, site, 0);
  current->predicate = predicate;
  if (++num_at_barrier == num_alive) {
    for (int i = 0; i < block.num_threads; ++i) {
      const Fiber& other = fibers[i];
      if (other.state != State::at_block_barrier) continue;
      if (other.site.line != site.line || strcmp(other.site.file, site.file) != 0)
        fail({nullptr, site}, "divergent-barrier",
             "%s by thread %d, but thread %d is in %s at %s:%d", name, current->number, i,
             other.call, other.site.file, other.site.line);
    }
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

bool run_block(void (*kernel)(void**), void** args) {
  if (fibers.empty()) make_fibers();
  kernel_entry = kernel;
  kernel_args = args;
  failed = false;
  ready.clear();
  num_alive = block.num_threads;
  num_at_barrier = 0;
  for (Warp& warp : warps) warp = {};
  for (Exchange* exchange : exchanges) exchange->holders = 0;
  for (int i = 0; i < block.num_threads; ++i) start_fiber(fibers[i]);
  const int first = pick(launch.order == Order::reverse ? 0 : block.num_threads - 1);
  ready.remove(first);
  current = &fibers[first];
  hostsim_switch(&launch_stack_pointer, current->stack_pointer);
  current = nullptr;
  return !failed;
}

}  // namespace hostsim
