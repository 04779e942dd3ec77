// Shared memory of a block, and cp.async into it.

#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "block.h"
#include "checker.h"
#include "shared_memory.h"

namespace hostsim {

namespace {

constexpr size_t kGapBytes = 64;  // between arrays; wider than any access

unsigned char* arena;
size_t arena_used, allocated, allowed;
std::vector<SharedArray> arrays;

// Memory starts as NaN in every float format, so that what is used unset shows in results.
unsigned char* open_array(const void* key, size_t size) {
  const size_t start = (arena_used + kGapBytes + 127) / 128 * 128;
  arena_used = start + size;
  if (arena_used + kGapBytes > kArenaBytes)
    fail({}, "shared-limit", "more than %zu bytes of shared memory", kArenaBytes);
  arrays.push_back({key, start, size});
  memset(arena + start, 0xff, size);
  return arena + start;
}

}  // namespace

void open_shared_memory(size_t dynamic_bytes, size_t limit) {
  if (!arena)
    arena = (unsigned char*)mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  arrays.clear();
  arena_used = 0;
  allocated = dynamic_bytes;
  allowed = limit;
  open_array(nullptr, dynamic_bytes);
}

unsigned char* dynamic_shared() { return arena + arrays[0].start; }

void* static_shared(const void* key, size_t size) {
  for (const SharedArray& array : arrays)
    if (array.key == key) return arena + array.start;
  allocated += size;
  if (allocated > allowed)
    fail({__builtin_return_address(0), {}}, "shared-limit",
         "%zu bytes of static and dynamic shared memory, but the kernel may have %zu", allocated,
         allowed);
  return open_array(key, size);
}

bool in_shared_arena(const void* address) {
  return (size_t)((const unsigned char*)address - arena) < kArenaBytes;
}

size_t shared_offset(const void* address) {
  return (size_t)((const unsigned char*)address - arena);
}

const SharedArray* shared_array_of(size_t offset, size_t size) {
  for (const SharedArray& array : arrays)
    if (offset >= array.start && offset + size <= array.start + array.size) return &array;
  return nullptr;
}

const SharedArray& shared_array_near(size_t offset) {
  const SharedArray* nearest = &arrays[0];
  for (const SharedArray& array : arrays)
    if (array.start <= offset && array.start >= nearest->start) nearest = &array;
  return *nearest;
}

void check_shared_row(const void* address, Site site) {
  if (!in_shared_arena(address))
    fail_at(site, "wrong-memory", "ldmatrix of memory that is not shared");
  check(address, 16, Access::read, 16, {nullptr, site});
}

void copy_async16(void* target, const void* source, bool pred, Site site) {
  const Place place{nullptr, site};
  if (!in_shared_arena(target))
    fail_at(site, "wrong-memory", "cp.async into memory that is not shared");
  if (pred && in_shared_arena(source))
    fail_at(site, "wrong-memory", "cp.async out of shared memory");
  AsyncCopy copy{(unsigned char*)target, pred ? source : nullptr, {}, current->copy_group, site};
  if (pred) {
    check(source, 16, Access::read, 16, place);
    memcpy(copy.bytes, source, 16);
  }
  check(target, 16, Access::copy_issued, 16, place);
  memset(target, 0xff, 16);
  current->copies.push_back(copy);
}

void copy_commit() { ++current->copy_group; }

void copy_wait(int groups_in_flight) {
  std::vector<AsyncCopy>& copies = current->copies;
  size_t landed = 0;
  for (; landed < copies.size(); ++landed) {
    const AsyncCopy& copy = copies[landed];
    if (copy.group >= current->copy_group - groups_in_flight) break;
    const Place place{nullptr, copy.site};
    if (copy.source && memcmp(copy.source, copy.bytes, 16) != 0)
      fail(place, "cp-async", "the source of this cp.async was written while it was in flight");
    memcpy(copy.target, copy.bytes, 16);
    check(copy.target, 16, Access::copy_landed, 16, place);
  }
  copies.erase(copies.begin(), copies.begin() + (long)landed);
}

}  // namespace hostsim
