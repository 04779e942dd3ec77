// Takes the place of libtsan and libubsan: the kernel's translation unit is compiled with
// -fsanitize=thread,... and so calls these at every access and every suspect operation.

#if defined(HOSTSIM_CHECK)

#include <cstring>

#include "block.h"
#include "checker.h"

using namespace hostsim;

#define HOOK extern "C" __attribute__((visibility("default")))
#define PLACE (Place{__builtin_return_address(0), {}})

#define ALIGNED_ACCESS(size)                             \
  HOOK void __tsan_read##size(void* address) {           \
    maybe_preempt();                                     \
    check(address, size, Access::read, size, PLACE);     \
  }                                                      \
  HOOK void __tsan_write##size(void* address) {          \
    maybe_preempt();                                     \
    check(address, size, Access::write, size, PLACE);    \
  }
#define UNALIGNED_ACCESS(size)                           \
  HOOK void __tsan_unaligned_read##size(void* address) { \
    check(address, size, Access::read, 1, PLACE);        \
  }                                                      \
  HOOK void __tsan_unaligned_write##size(void* address) { \
    check(address, size, Access::write, 1, PLACE);       \
  }

ALIGNED_ACCESS(1)
ALIGNED_ACCESS(2)
ALIGNED_ACCESS(4)
ALIGNED_ACCESS(8)
ALIGNED_ACCESS(16)
UNALIGNED_ACCESS(2)
UNALIGNED_ACCESS(4)
UNALIGNED_ACCESS(8)
UNALIGNED_ACCESS(16)

HOOK void __tsan_read_range(void* address, size_t size) {
  check(address, size, Access::read, 1, PLACE);
}
HOOK void __tsan_write_range(void* address, size_t size) {
  check(address, size, Access::write, 1, PLACE);
}
HOOK void* __tsan_memset(void* target, int value, size_t size) {
  check(target, size, Access::write, 1, PLACE);
  return memset(target, value, size);
}
HOOK void* __tsan_memcpy(void* target, const void* source, size_t size) {
  check(source, size, Access::read, 1, PLACE);
  check(target, size, Access::write, 1, PLACE);
  return memcpy(target, source, size);
}
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_read(void**) {}
HOOK void __tsan_vptr_update(void**, void*) {}

#define SUSPECT(handler, kind, text, ...)                        \
  HOOK void __ubsan_handle_##handler(void*, ##__VA_ARGS__) {     \
    if (current) fail(PLACE, kind, "%s", text);                  \
  }

SUSPECT(out_of_bounds, "index", "index outside of an array", void*)
SUSPECT(type_mismatch_v1, "misaligned", "access that is not aligned for its type", void*)
SUSPECT(add_overflow, "overflow", "signed overflow of +", void*, void*)
SUSPECT(sub_overflow, "overflow", "signed overflow of -", void*, void*)
SUSPECT(mul_overflow, "overflow", "signed overflow of *", void*, void*)
SUSPECT(negate_overflow, "overflow", "signed overflow of negation", void*)
SUSPECT(divrem_overflow, "division", "division by zero, or its result overflows", void*, void*)
SUSPECT(shift_out_of_bounds, "shift", "left shift of a negative number, or shift by too much",
        void*, void*)
SUSPECT(float_cast_overflow, "conversion", "float that does not fit the integer type", void*)

#endif
