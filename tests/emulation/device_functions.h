// CUDA's barriers, shuffles, votes and intrinsics, spelled as in CUDA. The defaulted `place` is where a fault
// report points.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator.h"

// ---- Barriers
// -----------------------------------------------------------------------------------------------------

inline void __syncthreads(pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  pagedkv::emulator::cta_barrier("__syncthreads", false, place);
}

inline int __syncthreads_count(int predicate,
                               pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  return pagedkv::emulator::cta_barrier("__syncthreads_count", predicate != 0, place);
}

inline int __syncthreads_or(int predicate,
                            pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  return pagedkv::emulator::cta_barrier("__syncthreads_or", predicate != 0, place) != 0;
}

inline int __syncthreads_and(int predicate,
                             pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  return pagedkv::emulator::cta_barrier("__syncthreads_and", predicate == 0, place) == 0;
}

inline void __syncwarp(uint32_t mask = 0xffffffffu,
                       pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  pagedkv::emulator::warp_collective(mask, "__syncwarp", nullptr, nullptr,
                                     pagedkv::emulator::MemoryOrder::fence, place);
}

inline void __threadfence() { pagedkv::emulator::preempt(); }
inline void __threadfence_block() { pagedkv::emulator::preempt(); }

[[noreturn]] inline void __trap(pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  pagedkv::emulator::fault(place, "__trap()");
}

// ---- Shuffles, votes and reductions
// -------------------------------------------------------------------------------

namespace pagedkv::emulator {

enum class ShuffleMode { index, up, down, exclusive_or };
enum class ReduceMode { add, min, max, bit_and, bit_or, bit_xor };

uint64_t shuffle(ShuffleMode mode, uint32_t mask, uint64_t bits, int operand, int width, const char* name,
                 const Place& place);
uint32_t ballot(const char* name, uint32_t mask, bool predicate, const Place& place);
uint32_t match_any(uint32_t mask, uint64_t bits, const Place& place);
int64_t reduce(ReduceMode mode, uint32_t mask, int64_t value, const char* name, const Place& place);

template <class Value>
Value shuffle_value(ShuffleMode mode, uint32_t mask, Value value, int operand, int width, const char* name,
                    const Place& place) {
  static_assert(std::is_trivially_copyable_v<Value> && sizeof(Value) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = shuffle(mode, mask, bits, operand, width, name, place);
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

}  // namespace pagedkv::emulator

#define PAGEDKV_DEFINE_SHUFFLE(name, mode, operand_type)                                       \
  template <class Value>                                                                       \
  Value name(uint32_t mask, Value value, operand_type operand, int width = 32,                 \
             pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {           \
    return pagedkv::emulator::shuffle_value(pagedkv::emulator::ShuffleMode::mode, mask, value, \
                                            static_cast<int>(operand), width, #name, place);   \
  }
PAGEDKV_DEFINE_SHUFFLE(__shfl_sync, index, int)
PAGEDKV_DEFINE_SHUFFLE(__shfl_up_sync, up, unsigned)
PAGEDKV_DEFINE_SHUFFLE(__shfl_down_sync, down, unsigned)
PAGEDKV_DEFINE_SHUFFLE(__shfl_xor_sync, exclusive_or, int)
#undef PAGEDKV_DEFINE_SHUFFLE

inline uint32_t __ballot_sync(uint32_t mask, int predicate,
                              pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  return pagedkv::emulator::ballot("__ballot_sync", mask, predicate != 0, place);
}

inline int __any_sync(uint32_t mask, int predicate,
                      pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  return pagedkv::emulator::ballot("__any_sync", mask, predicate != 0, place) != 0;
}

inline int __all_sync(uint32_t mask, int predicate,
                      pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  return pagedkv::emulator::ballot("__all_sync", mask, predicate == 0, place) == 0;
}

template <class Value>
uint32_t __match_any_sync(uint32_t mask, Value value,
                          pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {
  static_assert(std::is_trivially_copyable_v<Value> && (sizeof(Value) == 4 || sizeof(Value) == 8));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  return pagedkv::emulator::match_any(mask, bits, place);
}

// Of int and unsigned, as on the device. Sums wrap around; minimum and maximum follow the type's sign.
#define PAGEDKV_DEFINE_REDUCE(name, mode)                                                            \
  template <class Value>                                                                             \
  Value name(uint32_t mask, Value value,                                                             \
             pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {                 \
    static_assert(std::is_integral_v<Value> && sizeof(Value) == 4, #name " takes int and unsigned"); \
    return static_cast<Value>(                                                                       \
        pagedkv::emulator::reduce(pagedkv::emulator::ReduceMode::mode, mask, value, #name, place));  \
  }
PAGEDKV_DEFINE_REDUCE(__reduce_add_sync, add)
PAGEDKV_DEFINE_REDUCE(__reduce_min_sync, min)
PAGEDKV_DEFINE_REDUCE(__reduce_max_sync, max)
PAGEDKV_DEFINE_REDUCE(__reduce_and_sync, bit_and)
PAGEDKV_DEFINE_REDUCE(__reduce_or_sync, bit_or)
PAGEDKV_DEFINE_REDUCE(__reduce_xor_sync, bit_xor)
#undef PAGEDKV_DEFINE_REDUCE

// ---- Atomics
// ------------------------------------------------------------------------------------------------------
// Relaxed, as on the device: they order no other access.

namespace pagedkv::emulator {

// Replaces *address by update(*address) in one step and returns what was there.
template <class Value, class Update>
Value atomic_update(Value* address, Update update) {
  preempt();
  Value before;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  Value after = update(before);
  while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    after = update(before);
  }
  return before;
}

}  // namespace pagedkv::emulator

#define PAGEDKV_DEFINE_ATOMIC(name, expression)                                                            \
  template <class Value>                                                                                   \
  Value name(Value* address, std::type_identity_t<Value> operand) {                                        \
    return pagedkv::emulator::atomic_update(address,                                                       \
                                            [&](Value before) { return static_cast<Value>(expression); }); \
  }
PAGEDKV_DEFINE_ATOMIC(atomicAdd, before + operand)
PAGEDKV_DEFINE_ATOMIC(atomicSub, before - operand)
PAGEDKV_DEFINE_ATOMIC(atomicMax, before < operand ? operand : before)
PAGEDKV_DEFINE_ATOMIC(atomicMin, operand < before ? operand : before)
PAGEDKV_DEFINE_ATOMIC(atomicAnd, before& operand)
PAGEDKV_DEFINE_ATOMIC(atomicOr, before | operand)
PAGEDKV_DEFINE_ATOMIC(atomicXor, before ^ operand)
PAGEDKV_DEFINE_ATOMIC(atomicExch, (static_cast<void>(before), operand))
#undef PAGEDKV_DEFINE_ATOMIC

template <class Value>
Value atomicCAS(Value* address, std::type_identity_t<Value> expected, std::type_identity_t<Value> desired) {
  pagedkv::emulator::preempt();
  __atomic_compare_exchange(address, &expected, &desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// ---- Loads and stores with a cache hint
// ---------------------------------------------------------------------------

#define PAGEDKV_DEFINE_LOAD(name)                                                                          \
  template <class Value>                                                                                   \
  Value name(const Value* address, pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) { \
    pagedkv::emulator::check_vector_access(#name, pagedkv::emulator::AccessKind::read, address,            \
                                           sizeof(Value), place);                                          \
    return *address;                                                                                       \
  }
PAGEDKV_DEFINE_LOAD(__ldg)
PAGEDKV_DEFINE_LOAD(__ldcg)
PAGEDKV_DEFINE_LOAD(__ldcs)
#undef PAGEDKV_DEFINE_LOAD

#define PAGEDKV_DEFINE_STORE(name)                                                               \
  template <class Value>                                                                         \
  void name(Value* address, std::type_identity_t<Value> value,                                   \
            pagedkv::emulator::Place place = pagedkv::emulator::Place::current()) {              \
    pagedkv::emulator::check_vector_access(#name, pagedkv::emulator::AccessKind::write, address, \
                                           sizeof(Value), place);                                \
    *address = value;                                                                            \
  }
PAGEDKV_DEFINE_STORE(__stcg)
PAGEDKV_DEFINE_STORE(__stcs)
#undef PAGEDKV_DEFINE_STORE

// ---- Arithmetic
// --------------------------------------------------------------------------------------------------- The
// approximate functions are exact to their float32 rounding here: a device's error is the tests' tolerance to
// cover.

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float numerator, float denominator) { return numerator / denominator; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }

inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __popcll(uint64_t bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<uint32_t>(bits)); }
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(bits)) + 1; }

template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> wide_a = a, wide_b = b;
  return wide_b < wide_a ? wide_b : wide_a;
}

template <class A, class B>
  requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> wide_a = a, wide_b = b;
  return wide_a < wide_b ? wide_b : wide_a;
}
