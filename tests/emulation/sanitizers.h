// What the sanitizers have to be told about fibers and about the order that barriers make. Each function is
// empty in a build without its sanitizer.
//
// ThreadSanitizer: every CUDA thread is a race context of its own, and a switch between contexts orders
// nothing; only release and acquire of a tag do. The emulator itself must be compiled without
// -fsanitize=thread, or its own bookkeeping would look like races between the threads it plays, so
// PAGEDKV_EMULATOR_TSAN says that the kernels are.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define PAGEDKV_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PAGEDKV_EMULATOR_ASAN 1
#endif
#endif

#if defined(PAGEDKV_EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(PAGEDKV_EMULATOR_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace pagedkv::emulator::sanitizers {

#if defined(PAGEDKV_EMULATOR_ASAN)
inline constexpr bool HAS_RED_ZONES = true;
inline void begin_switch(void** own_fake_stack, const void* stack_begin, size_t stack_bytes) {
  __sanitizer_start_switch_fiber(own_fake_stack, stack_begin, stack_bytes);
}
inline void end_switch(void* own_fake_stack, const void** left_stack_begin, size_t* left_stack_bytes) {
  __sanitizer_finish_switch_fiber(own_fake_stack, left_stack_begin, left_stack_bytes);
}
inline void forget_frames(void* stack_begin, size_t stack_bytes) {
  __asan_unpoison_memory_region(stack_begin, stack_bytes);
}
#else
inline constexpr bool HAS_RED_ZONES = false;
inline void begin_switch(void**, const void*, size_t) {}
inline void end_switch(void*, const void**, size_t*) {}
inline void forget_frames(void*, size_t) {}
#endif

#if defined(PAGEDKV_EMULATOR_TSAN)
inline constexpr bool WATCHES_RACES = true;
inline void* current_race_context() { return __tsan_get_current_fiber(); }
inline void* create_race_context() { return __tsan_create_fiber(0); }
inline void destroy_race_context(void* context) { __tsan_destroy_fiber(context); }
inline void switch_race_context(void* context) {
  __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync);
}
inline void release(char* tag) { __tsan_release(tag); }
inline void acquire(char* tag) { __tsan_acquire(tag); }
#else
inline constexpr bool WATCHES_RACES = false;
inline void* current_race_context() { return nullptr; }
inline void* create_race_context() { return nullptr; }
inline void destroy_race_context(void*) {}
inline void switch_race_context(void*) {}
inline void release(char*) {}
inline void acquire(char*) {}
#endif

}  // namespace pagedkv::emulator::sanitizers
