// How collectives make threads wait and go on.
#pragma once

#include "block.h"

namespace hostsim {

void make_ready(Fiber& fiber);
// Leaves the current fiber, which waits or is done, until it is ready again.
void run_others();

void begin_collectives();
// The current thread is done; how many are left.
int exit_thread();

}  // namespace hostsim
