// Where the arrays of the running block's shared memory lie.
#pragma once

#include <cstddef>

namespace hostsim {

struct SharedArray {
  const void* key;  // null: the dynamic one
  size_t start, size;
};

size_t shared_offset(const void* address);
// The array that holds these bytes; null if none holds all of them.
const SharedArray* shared_array_of(size_t offset, size_t size);
// The last array that starts at or before offset.
const SharedArray& shared_array_near(size_t offset);

}  // namespace hostsim
