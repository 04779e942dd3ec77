// Fibers: runs the threads of one block by turns.

#include "scheduler.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

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

ReadySet ready;
uint64_t random_state;
void* launch_stack_pointer;
void (*kernel_entry)(void**);
void** kernel_args;
bool failed;

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

void fiber_main() {
  kernel_entry(kernel_args);
  if (exit_thread() == 0) leave_launch();
  run_others();
  __builtin_unreachable();
}

void make_fibers() {
  char* stacks = (char*)mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fibers.resize(kMaxThreads);
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

void make_ready(Fiber& fiber) {
  fiber.state = State::ready;
  ready.add(fiber.number);
}

void run_others() {
  Fiber* me = current;
  const int next = pick(me->number);
  if (next < 0) fail_stuck();
  ready.remove(next);
  if (next == me->number) return;
  current = &fibers[next];
  hostsim_switch(&me->stack_pointer, current->stack_pointer);
}

void maybe_preempt() {
  if (!preempting || !current || (random_number() & 255) != 0) return;
  make_ready(*current);
  run_others();
}

bool run_block(void (*kernel)(void**), void** args) {
  if (fibers.empty()) make_fibers();
  kernel_entry = kernel;
  kernel_args = args;
  failed = false;
  ready.clear();
  begin_collectives();
  for (int i = 0; i < block.num_threads; ++i) start_fiber(fibers[i]);
  const int first = pick(launch.order == Order::reverse ? 0 : block.num_threads - 1);
  ready.remove(first);
  current = &fibers[first];
  hostsim_switch(&launch_stack_pointer, current->stack_pointer);
  current = nullptr;
  return !failed;
}

}  // namespace hostsim
