// What loader.py passes in and gets back; its ctypes structures mirror these.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>

#include "block.h"

namespace hostsim {

enum class Order : int32_t { forward, reverse, random };

struct Region {
  unsigned char* start;
  unsigned char* origin;  // of the allocation, which a GPU aligns to 256 bytes
  size_t size;
  const char* name;
  int32_t writable;
};

struct Launch {
  void (*kernel)(void** args);
  void** args;
  const Region* regions;
  uint64_t num_regions;
  uint64_t seed;
  uint64_t shared_bytes;  // dynamic
  uint64_t shared_limit;  // dynamic and static together
  uint64_t max_accesses;  // of one block, before it is thought to hang
  uint3 grid, block;
  Order order;
  int32_t preempt;
  int32_t count_traffic;
};

struct Fault {
  char kind[32];
  char message[768];
  char file[256];  // empty where only the code offset is known
  int32_t line;
  int32_t thread_known;
  uint64_t code_offset;  // from the start of the library
  uint3 block, thread;
};

extern Launch launch;

void record_fault(Place place, const char* kind, const char* format, va_list arguments);

}  // namespace hostsim
