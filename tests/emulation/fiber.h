// A stack of its own that runs until it suspends itself.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace pagedkv::emulator {

class Fiber {
 public:
  using Body = void (*)(void* context);

  // `body(context)` starts at the first resume() and must never return: it suspends instead.
  Fiber(Body body, void* context);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();   // from outside: runs the fiber until its next suspend()
  void suspend();  // from inside
  void rewind();   // from outside: forgets where the fiber is; the next resume() starts `body` anew

 private:
  static void enter();

  Body body_;
  void* context_;
  unsigned char* mapping_;  // a guard page, then the stack
#if defined(__x86_64__)
  void* fiber_stack_pointer_ = nullptr;
  void* host_stack_pointer_ = nullptr;
#else
  ucontext_t fiber_context_, host_context_;
#endif
  // What AddressSanitizer wants to know when the stack changes.
  void* fiber_fake_stack_ = nullptr;
  void* host_fake_stack_ = nullptr;
  const void* host_stack_begin_ = nullptr;
  size_t host_stack_bytes_ = 0;
};

}  // namespace pagedkv::emulator
