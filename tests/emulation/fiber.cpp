#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "sanitizers.h"

namespace pagedkv::emulator {
namespace {

constexpr size_t STACK_BYTES =
    256 * 1024;  // kernels hold registers' worth of state; sanitizers make frames larger

size_t guard_bytes() {
  static const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page_bytes;
}

__thread Fiber* entering_fiber __attribute__((tls_model("initial-exec"))) = nullptr;

}  // namespace

#if defined(__x86_64__)
// void pagedkv_switch_stack(void** save_stack_pointer, void* next_stack_pointer): saves what the System V ABI
// wants kept over a call on the old stack, and returns on the new one. ucontext does the same with a system
// call, 30 times slower.
extern "C" void pagedkv_switch_stack(void** save_stack_pointer, void* next_stack_pointer)
    __attribute__((visibility("hidden")));
asm(R"(
.text
.globl pagedkv_switch_stack
.hidden pagedkv_switch_stack
.type pagedkv_switch_stack,@function
pagedkv_switch_stack:
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
.size pagedkv_switch_stack, .-pagedkv_switch_stack
)");
#endif

Fiber::Fiber(Body body, void* context) : body_(body), context_(context) {
  void* mapping = mmap(nullptr, guard_bytes() + STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (mapping == MAP_FAILED || mprotect(mapping, guard_bytes(), PROT_NONE) != 0) {
    throw std::system_error(errno, std::generic_category(), "emulator: cannot map the stack of a fiber");
  }
  mapping_ = static_cast<unsigned char*>(mapping);
  rewind();
}

Fiber::~Fiber() {
  sanitizers::forget_frames(mapping_ + guard_bytes(), STACK_BYTES);
  munmap(mapping_, guard_bytes() + STACK_BYTES);
}

void Fiber::enter() {
  Fiber& fiber = *entering_fiber;
  sanitizers::end_switch(nullptr, &fiber.host_stack_begin_, &fiber.host_stack_bytes_);
  fiber.body_(fiber.context_);
  std::abort();  // a body never returns
}

void Fiber::rewind() {
  unsigned char* stack_begin = mapping_ + guard_bytes();
  sanitizers::forget_frames(stack_begin, STACK_BYTES);
  fiber_fake_stack_ = nullptr;
#if defined(__x86_64__)
  // The first switch pops six registers and returns into enter(), which must find the stack as after a call:
  // a (null) return address below a 16-byte boundary.
  void** top = reinterpret_cast<void**>(stack_begin + STACK_BYTES);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Fiber::enter);
  for (int register_idx = 0; register_idx < 6; ++register_idx) *--top = nullptr;
  fiber_stack_pointer_ = top;
#else
  getcontext(&fiber_context_);
  fiber_context_.uc_stack.ss_sp = stack_begin;
  fiber_context_.uc_stack.ss_size = STACK_BYTES;
  fiber_context_.uc_link = nullptr;
  makecontext(&fiber_context_, &Fiber::enter, 0);
#endif
}

void Fiber::resume() {
  entering_fiber = this;
  sanitizers::begin_switch(&host_fake_stack_, mapping_ + guard_bytes(), STACK_BYTES);
#if defined(__x86_64__)
  pagedkv_switch_stack(&host_stack_pointer_, fiber_stack_pointer_);
#else
  swapcontext(&host_context_, &fiber_context_);
#endif
  sanitizers::end_switch(host_fake_stack_, nullptr, nullptr);
}

void Fiber::suspend() {
  sanitizers::begin_switch(&fiber_fake_stack_, host_stack_begin_, host_stack_bytes_);
#if defined(__x86_64__)
  pagedkv_switch_stack(&fiber_stack_pointer_, host_stack_pointer_);
#else
  swapcontext(&fiber_context_, &host_context_);
#endif
  sanitizers::end_switch(fiber_fake_stack_, &host_stack_begin_, &host_stack_bytes_);
}

}  // namespace pagedkv::emulator
