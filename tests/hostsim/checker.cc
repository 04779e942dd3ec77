// Bounds, alignment, uninitialised shared memory and races, for every access of a kernel.
//
// Each byte of shared memory and of arrays that a kernel may write has a shadow: who wrote it last,
// and which threads read it since. An access is a race if it meets one of those that is not ordered
// before it by a barrier, in the manner of Flanagan and Freund, "FastTrack: efficient and precise
// dynamic race detection", PLDI 2009; a barrier count and one clock a lane do for vector clocks,
// since barriers and __syncwarp are all that orders the threads of a block.

#include "checker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "fences.h"
#include "launch.h"
#include "shared_memory.h"
#include "traffic.h"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;  // by the linker

namespace hostsim {

#if !defined(HOSTSIM_CHECK)

void check(const void*, size_t, Access, size_t, Place) {}
void check_atomic(void*, size_t, Site) {}
void begin_checks() {}
void begin_block_checks() {}
void end_block_checks() {}
void end_checks() {}

#else

namespace {

// Three readers are enough: whoever writes, one of them is another thread, and one another warp.
struct Shadow {
  Event write, read, same_warp_read, other_warp_read;
  uint32_t block;  // of shared memory: number + 1 of the block that this is about
  bool written, atomic, copy_in_flight;
};

// Arrays that overlap, and are written by one name or another.
struct Span {
  uintptr_t start, end;
  Shadow* shadows;
};

std::vector<Span> spans;
Shadow* shared_shadows;
uint64_t num_accesses;  // of the running block

// Zeros, which cost memory only where they are written.
Shadow* new_shadows(size_t count) {
  return (Shadow*)mmap(nullptr, count * sizeof(Shadow), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

const char* verb(Access access) {
  switch (access) {
    case Access::read:
      return "read";
    case Access::atomic:
      return "atomic update";
    default:
      return "write";
  }
}

bool writes(Access access) { return access != Access::read; }

uint32_t number_in_block(const Event& event) { return event.thread - 1 - block.first_thread; }

bool happened_before(const Event& event) {
  if (event.thread == 0) return true;
  const uint32_t number = number_in_block(event);
  if (number >= (uint32_t)block.num_threads) return was_handed_over(event);
  if (number == (uint32_t)current->number || event.barriers != current->barriers) return true;
  return (int)number / kWarpSize == current->warp &&
         event.warp_barriers <= current->known[number % kWarpSize];
}

[[noreturn]] void fail_race(const char* kind, const char* what, size_t offset, Access access,
                            const char* earlier, const Event& event, Place place) {
  const uint32_t number = number_in_block(event);
  if (number < (uint32_t)block.num_threads)
    fail(place, kind, "%s of byte %zu of %s after a %s by thread %u, with no barrier between",
         verb(access), offset, what, earlier, number);
  fail(place, kind, "%s of byte %zu of %s after a %s by another block", verb(access), offset, what,
       earlier);
}

void check_order(const Shadow& shadow, const char* kind, const char* what, size_t offset,
                 Access access, Place place) {
  const bool both_atomic = access == Access::atomic && shadow.atomic;
  if (!both_atomic && !happened_before(shadow.write))
    fail_race(kind, what, offset, access, shadow.atomic ? "atomic update" : "write", shadow.write,
              place);
  if (!writes(access)) return;
  for (const Event* event : {&shadow.read, &shadow.same_warp_read, &shadow.other_warp_read})
    if (!happened_before(*event)) fail_race(kind, what, offset, access, "read", *event, place);
}

void remember(Shadow& shadow, Access access) {
  const Event now{block.first_thread + (uint32_t)current->number + 1, current->barriers,
                  current->warp_barriers};
  if (writes(access)) {
    shadow.write = now;
    shadow.written = true;
    shadow.atomic = access == Access::atomic;
    shadow.copy_in_flight = access == Access::copy_issued;
    return;
  }
  if (!happened_before(shadow.read)) {
    const bool same_warp = (int)number_in_block(shadow.read) / kWarpSize == current->warp &&
                           number_in_block(shadow.read) < (uint32_t)block.num_threads;
    (same_warp ? shadow.same_warp_read : shadow.other_warp_read) = shadow.read;
  }
  shadow.read = now;
}

void check_shared(size_t offset, size_t size, Access access, Place place) {
  const SharedArray* array = shared_array_of(offset, size);
  const SharedArray& near = array ? *array : shared_array_near(offset);
  const char* what = near.key ? "a SHARED array" : "dynamic shared memory";
  const size_t start = offset - near.start;
  if (!array)
    fail(place, "shared-out-of-bounds", "%s of %zu bytes at byte %zu of %s of %zu bytes",
         verb(access), size, start, what, near.size);
  for (size_t i = 0; i < size; ++i) {
    Shadow& shadow = shared_shadows[offset + i];
    if (shadow.block != block.number + 1) {
      shadow = {};
      shadow.block = block.number + 1;
    }
    if (shadow.copy_in_flight && access != Access::copy_landed)
      fail(place, "cp-async", "%s of byte %zu of %s while a cp.async into it is in flight",
           verb(access), start + i, what);
    const bool reads = access == Access::read || access == Access::atomic;
    if (reads && !shadow.written)
      fail(place, "uninitialised-shared", "%s of byte %zu of %s, which was never written",
           verb(access), start + i, what);
    check_order(shadow, "shared-race", what, start + i, access, place);
    remember(shadow, access);
  }
  if (launch.count_traffic && access != Access::copy_landed)
    count_access(place, nullptr, offset, size, writes(access));
}

[[noreturn]] void fail_outside(uintptr_t address, size_t size, Access access, Place place) {
  if (address < 4096)
    fail(place, "global-out-of-bounds", "%s through a null pointer", verb(access));
  const Region* nearest = nullptr;
  long long distance = 0;
  for (uint64_t i = 0; i < launch.num_regions; ++i) {
    const long long offset = (long long)(address - (uintptr_t)launch.regions[i].start);
    if (nearest && llabs(offset) >= llabs(distance)) continue;
    nearest = &launch.regions[i];
    distance = offset;
  }
  if (!nearest)
    fail(place, "global-out-of-bounds", "%s of %zu bytes at an unknown address", verb(access),
         size);
  fail(place, "global-out-of-bounds", "%s of %zu bytes at byte %lld of `%s`, which has %zu bytes",
       verb(access), size, distance, nearest->name, nearest->size);
}

bool contains(const Region& region, uintptr_t address, size_t size) {
  const uintptr_t start = (uintptr_t)region.start;
  return address >= start && size <= region.size && address - start <= region.size - size;
}

// Views of one array may overlap: a byte may be accessed if any argument allows it.
const Region& region_for(uintptr_t address, size_t size, Access access, Place place) {
  static uint64_t recent;
  const Region* read_only = nullptr;
  for (uint64_t n = 0; n < launch.num_regions; ++n) {
    const uint64_t i = (recent + n) % launch.num_regions;
    const Region& region = launch.regions[i];
    if (!contains(region, address, size)) continue;
    if (writes(access) && !region.writable) {
      read_only = &region;
      continue;
    }
    recent = i;
    return region;
  }
  if (!read_only) fail_outside(address, size, access, place);
  fail(place, "read-only", "%s of byte %zu of `%s`, which is const", verb(access),
       (size_t)(address - (uintptr_t)read_only->start), read_only->name);
}

void check_global(uintptr_t address, size_t size, Access access, Place place) {
  const Region& region = region_for(address, size, access, place);
  if (launch.count_traffic)
    count_access(place, region.name, address - (uintptr_t)region.origin, size, writes(access));
  for (const Span& span : spans) {
    if (address < span.start || address >= span.end) continue;
    for (size_t i = 0; i < size; ++i) {
      Shadow& shadow = span.shadows[address - span.start + i];
      check_order(shadow, "global-race", region.name,
                  (size_t)(address - (uintptr_t)region.start) + i, access, place);
      remember(shadow, access);
    }
    return;
  }
}

}  // namespace

void check(const void* pointer, size_t size, Access access, size_t alignment, Place place) {
  if (!current) return;
  const uintptr_t address = (uintptr_t)pointer;
  if (address - (uintptr_t)current->stack < kStackBytes) return;
  if (++num_accesses > launch.max_accesses)
    fail(place, "livelock", "a block made %llu accesses and did not end",
         (unsigned long long)launch.max_accesses);
  if (address % alignment != 0)
    fail(place, "misaligned", "%s of %zu bytes at an address that is no multiple of %zu",
         verb(access), size, alignment);
  if (in_shared_arena(pointer)) return check_shared(shared_offset(pointer), size, access, place);
  const bool in_image = address >= (uintptr_t)&__ehdr_start && address < (uintptr_t)&_end;
  if (in_image && !writes(access)) return;  // constants
  check_global(address, size, access, place);
}

void check_atomic(void* address, size_t size, Site site) {
  maybe_preempt();
  check(address, size, Access::atomic, size, {nullptr, site});
  if (!in_shared_arena(address)) hand_over(address);
}

void begin_checks() {
  begin_fences();
  begin_traffic();
  if (!shared_shadows) shared_shadows = new_shadows(kArenaBytes);
  // Numbers of blocks start anew in each launch.
  madvise(shared_shadows, kArenaBytes * sizeof(Shadow), MADV_DONTNEED);
  std::vector<Region> regions(launch.regions, launch.regions + launch.num_regions);
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.start < b.start; });
  bool writable = false;
  uintptr_t start = 0, end = 0;
  const auto close_span = [&] {
    if (writable) spans.push_back({start, end, new_shadows(end - start)});
  };
  for (const Region& region : regions) {
    if (region.size == 0) continue;
    const uintptr_t first = (uintptr_t)region.start;
    if (first >= end) {
      close_span();
      writable = false;
      start = first;
      end = first;
    }
    writable = writable || region.writable;
    end = std::max(end, first + region.size);
  }
  close_span();
}

void begin_block_checks() {
  begin_block_fences();
  num_accesses = 0;
}

void end_block_checks() {
  if (launch.count_traffic) end_block_traffic();
}

void end_checks() {
  for (const Span& span : spans) munmap(span.shadows, (span.end - span.start) * sizeof(Shadow));
  spans.clear();
}

#endif

}  // namespace hostsim
