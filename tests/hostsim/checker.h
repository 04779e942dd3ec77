// The memory checker; in mode "plain" it checks nothing.
#pragma once

#include "block.h"

namespace hostsim {

enum class Access : uint8_t { read, write, atomic, copy_issued, copy_landed };

// Fails if the current thread may not access these bytes now; remembers the access.
void check(const void* address, size_t size, Access access, size_t alignment, Place place);

void begin_checks();
void begin_block_checks();
void end_block_checks();
void end_checks();

}  // namespace hostsim
