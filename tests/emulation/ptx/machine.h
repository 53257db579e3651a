// What translated PTX is made of, besides plain C++ operators: one function an instruction, on the emulator
// of the folder above. A register is an unsigned integer of its width, a predicate a bool:
//
//   add.s32 %r3, %r1, -1;       r3 = r1 + 0xffffffffu;
//   mul.rn.f32 %f3, %f1, %f2;   f3 = bits(as_float(f1) * as_float(f2));
//   ld.shared.u16 %rs1, [%r3];  rs1 = load<Space::shared, uint16_t, 1>(r3)[0];
//
// Global, local, param and generic addresses are host addresses. A shared address is an offset into the CTA's
// shared memory plus SHARED_WINDOW. Semantics: PTX ISA 9.0, "Instruction Set". Compile with -fwrapv.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "common/device.h"
#include "common/dtypes.h"

namespace pagedkv::emulator::ptx {

#define PAGEDKV_PTX [[gnu::always_inline]] inline

// ---- Registers
// ----------------------------------------------------------------------------------------------------

PAGEDKV_PTX float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
PAGEDKV_PTX double as_double(uint64_t bits) { return std::bit_cast<double>(bits); }

PAGEDKV_PTX uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }
PAGEDKV_PTX uint64_t bits(double value) { return std::bit_cast<uint64_t>(value); }
PAGEDKV_PTX uint16_t bits(float16 value) { return value.bits; }
PAGEDKV_PTX uint16_t bits(bfloat16 value) { return value.bits; }

// ---- Memory
// -------------------------------------------------------------------------------------------------------

enum class Space { global, shared, generic, local, constant, param };

// Where shared memory begins: not at 0, so that a null address is a fault, and as aligned as the memory
// itself.
inline constexpr uint64_t SHARED_WINDOW = 1024;

PAGEDKV_PTX unsigned char* shared_pointer(uint64_t address) {
  return shared_memory() + static_cast<int64_t>(static_cast<uint32_t>(address)) - SHARED_WINDOW;
}

PAGEDKV_PTX uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

PAGEDKV_PTX uint64_t shared_to_generic(uint64_t address) { return address_of(shared_pointer(address)); }
PAGEDKV_PTX uint64_t generic_to_shared(uint64_t address) {
  return address - address_of(shared_memory()) + SHARED_WINDOW;
}

void check_address(uint64_t address, size_t num_bytes, const Place& place);

template <Space SPACE>
PAGEDKV_PTX unsigned char* checked_pointer(uint64_t address, size_t num_bytes, AccessKind kind,
                                           const Place& place) {
  unsigned char* pointer = reinterpret_cast<unsigned char*>(address);
  if constexpr (SPACE == Space::shared) {
    pointer = shared_pointer(address);
    check_shared_access("an access of PTX", pointer, num_bytes, place);
  } else if constexpr (SPACE != Space::param) {
    // Parameters are aligned as the struct that they come from, which need not be so to a vector's size.
    check_address(address, num_bytes, place);
  }
  if constexpr (SPACE == Space::shared || SPACE == Space::global || SPACE == Space::generic) {
    if (current_thread->trace != nullptr) trace_access(kind, pointer, num_bytes, place);
  }
  return pointer;
}

template <Space SPACE, class T, int N = 1>
PAGEDKV_PTX std::array<T, N> load(uint64_t address, Place place = Place::current()) {
  std::array<T, N> values;
  std::memcpy(values.data(), checked_pointer<SPACE>(address, sizeof(values), AccessKind::read, place),
              sizeof(values));
  return values;
}

template <Space SPACE, class T, int N>
PAGEDKV_PTX void store(uint64_t address, const std::array<T, N>& values, Place place = Place::current()) {
  std::memcpy(checked_pointer<SPACE>(address, sizeof(values), AccessKind::write, place), values.data(),
              sizeof(values));
}

// atom and red: *address = update(*address), and what was there before.
template <Space SPACE, class T, class Update>
T atomic(uint64_t address, Update update, Place place = Place::current()) {
  return atomic_update(
      reinterpret_cast<T*>(checked_pointer<SPACE>(address, sizeof(T), AccessKind::write, place)), update);
}

// ---- Integers
// -----------------------------------------------------------------------------------------------------

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 4, int64_t, int32_t>,
                       std::conditional_t<sizeof(T) == 4, uint64_t, uint32_t>>>;

template <class T>
PAGEDKV_PTX Wide<T> mul_wide(T a, T b) {
  return static_cast<Wide<T>>(a) * b;
}
template <class T>
PAGEDKV_PTX T mul_lo(T a, T b) {
  return static_cast<T>(mul_wide(a, b));
}
template <class T>
PAGEDKV_PTX T mul_hi(T a, T b) {
  return static_cast<T>(mul_wide(a, b) >> (8 * sizeof(T)));
}
template <class T>
PAGEDKV_PTX T mad_lo(T a, T b, T c) {
  return static_cast<T>(mul_lo(a, b) + c);
}
template <class T>
PAGEDKV_PTX T mad_hi(T a, T b, T c) {
  return static_cast<T>(mul_hi(a, b) + c);
}
template <class T>
PAGEDKV_PTX Wide<T> mad_wide(T a, T b, Wide<T> c) {
  return mul_wide(a, b) + c;
}

// Division by zero has no result in PTX; here it is a fault.
template <class T>
PAGEDKV_PTX T div(T a, T b, Place place = Place::current()) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) fault(place, "integer division by zero");
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(-a);
  }
  return static_cast<T>(a / b);
}
template <class T>
PAGEDKV_PTX T rem(T a, T b, Place place = Place::current()) {
  if (b == 0) fault(place, "integer remainder of a division by zero");
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}

template <class T>
PAGEDKV_PTX T bit_not(T a) {
  if constexpr (std::is_same_v<T, bool>)
    return !a;
  else
    return static_cast<T>(~a);
}

// A shift by the width or more shifts everything out.
template <class T>
PAGEDKV_PTX T shl(T a, uint32_t count) {
  return count < 8 * sizeof(T) ? static_cast<T>(a << count) : T{0};
}
template <class T>
PAGEDKV_PTX T shr(T a, uint32_t count) {
  constexpr uint32_t LAST = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> (count < LAST ? count : LAST));
  return count <= LAST ? static_cast<T>(a >> count) : T{0};
}

// The funnel shifts of (high, low): `wrap` takes the count modulo 32, `clamp` up to 32.
PAGEDKV_PTX uint32_t shf_left(uint32_t low, uint32_t high, uint32_t count) {
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << count) >> 32);
}
PAGEDKV_PTX uint32_t shf_right(uint32_t low, uint32_t high, uint32_t count) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> count);
}
PAGEDKV_PTX uint32_t wrapped(uint32_t count) { return count & 31; }
PAGEDKV_PTX uint32_t clamped(uint32_t count) { return count < 32 ? count : 32; }

template <class T>
PAGEDKV_PTX uint32_t popc(T a) {
  return static_cast<uint32_t>(std::popcount(a));
}
template <class T>
PAGEDKV_PTX uint32_t clz(T a) {
  return static_cast<uint32_t>(std::countl_zero(a));
}
template <class T>
T brev(T a) {
  T reversed = 0;
  for (size_t i = 0; i < 8 * sizeof(T); ++i) reversed = static_cast<T>(reversed << 1 | (a >> i & 1));
  return reversed;
}

// `length` bits of a from bit `position` on, extended by their highest one where T is signed.
template <class T>
T bfe(T a, uint32_t position, uint32_t length) {
  constexpr uint32_t BITS = 8 * sizeof(T);
  position &= 0xff, length &= 0xff;
  using Unsigned = std::make_unsigned_t<T>;
  if (length == 0) return 0;
  const uint32_t last = position + length - 1 < BITS - 1 ? position + length - 1 : BITS - 1;
  const bool sign = std::is_signed_v<T> && (static_cast<Unsigned>(a) >> last & 1);
  const Unsigned bits = shr(static_cast<Unsigned>(a), position);
  if (length >= BITS) return static_cast<T>(sign ? shr(a, position) : static_cast<T>(bits));
  const Unsigned mask = static_cast<Unsigned>((Unsigned{1} << length) - 1);
  return static_cast<T>(sign ? bits | static_cast<Unsigned>(~mask) : bits & mask);
}

// b with `length` bits from bit `position` on replaced by those of a.
template <class T>
PAGEDKV_PTX T bfi(T a, T b, uint32_t position, uint32_t length) {
  position &= 0xff, length &= 0xff;
  const T ones = length >= 8 * sizeof(T) ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
  const T mask = shl(ones, position);
  return static_cast<T>((b & ~mask) | (shl(a, position) & mask));
}

// Byte i of the result is byte s of (b, a), s being nibble i of the selector; its high bit spreads the sign.
PAGEDKV_PTX uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7)) & 0xff);
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// Every bit is looked up by the bits of a, b and c in a table of eight.
PAGEDKV_PTX uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

// ---- Numbers of any kind
// ------------------------------------------------------------------------------------------

template <class T>
inline constexpr bool is_half_v = std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>;

// Rounded to nearest even; the NaN of a device.
template <class T>
PAGEDKV_PTX T narrow(float value) {
  if (value != value) return {0x7fff};
  return from_float<T>(value);
}

// Rounds once from double to a 16-bit format: to float32 by rounding inexact results to odd, then on.
template <class T>
T narrow_double(double value) {
  const float nearest = static_cast<float>(value);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (static_cast<double>(nearest) != value && std::isfinite(nearest) && bits % 2 == 0) {
    const bool away_from_zero = std::fabs(static_cast<double>(nearest)) < std::fabs(value);
    bits += away_from_zero ? 1 : -1u;
  }
  return narrow<T>(std::bit_cast<float>(bits));
}

template <class T>
PAGEDKV_PTX T add(T a, T b) {
  if constexpr (is_half_v<T>)
    return narrow<T>(to_float(a) + to_float(b));
  else
    return static_cast<T>(a + b);
}
template <class T>
PAGEDKV_PTX T sub(T a, T b) {
  if constexpr (is_half_v<T>)
    return narrow<T>(to_float(a) - to_float(b));
  else
    return static_cast<T>(a - b);
}
template <class T>
PAGEDKV_PTX T mul(T a, T b) {
  if constexpr (is_half_v<T>)
    return narrow<T>(to_float(a) * to_float(b));
  else
    return a * b;
}
template <class T>
PAGEDKV_PTX T fma(T a, T b, T c) {
  if constexpr (is_half_v<T>) {
    return narrow_double<T>(static_cast<double>(to_float(a)) * to_float(b) + to_float(c));
  } else {
    return std::fma(a, b, c);
  }
}
// fma.rm: rounded towards minus infinity.
float fma_down(float a, float b, float c);

template <class T>
PAGEDKV_PTX bool is_nan(T a) {
  if constexpr (std::is_integral_v<T>)
    return false;
  else
    return to_float(a) != to_float(a);
}

// Of a number and NaN, the number.
template <class T>
PAGEDKV_PTX T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(a, b);
  else if constexpr (is_half_v<T>)
    return narrow<T>(std::fmin(to_float(a), to_float(b)));
  else
    return b < a ? b : a;
}
template <class T>
PAGEDKV_PTX T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(a, b);
  else if constexpr (is_half_v<T>)
    return narrow<T>(std::fmax(to_float(a), to_float(b)));
  else
    return a < b ? b : a;
}
// Of a number and NaN, NaN.
template <class T>
PAGEDKV_PTX T min_nan(T a, T b) {
  return is_nan(a) || is_nan(b) ? add(a, b) : min(a, b);
}
template <class T>
PAGEDKV_PTX T max_nan(T a, T b) {
  return is_nan(a) || is_nan(b) ? add(a, b) : max(a, b);
}

template <class T>
PAGEDKV_PTX T neg(T a) {
  if constexpr (is_half_v<T>)
    return {static_cast<uint16_t>(a.bits ^ 0x8000)};
  else
    return static_cast<T>(-a);
}
template <class T>
PAGEDKV_PTX T abs(T a) {
  if constexpr (is_half_v<T>)
    return {static_cast<uint16_t>(a.bits & 0x7fff)};
  else if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return static_cast<T>(a < 0 ? -a : a);
}
// The sign of the first operand on the second.
template <class T>
PAGEDKV_PTX T copysign(T sign, T magnitude) {
  return std::copysign(magnitude, sign);
}

// Subnormal numbers become zero.
PAGEDKV_PTX float ftz(float a) {
  return std::fabs(a) < std::numeric_limits<float>::min() ? std::copysign(0.0f, a) : a;
}

// The approximate functions are exact to their rounding here; a device's error is for tests to tolerate.
PAGEDKV_PTX float rcp(float a) { return 1.0f / a; }
PAGEDKV_PTX float sqrt(float a) { return std::sqrt(a); }
PAGEDKV_PTX float rsqrt(float a) { return 1.0f / std::sqrt(a); }
PAGEDKV_PTX float ex2(float a) { return std::exp2(a); }
PAGEDKV_PTX float lg2(float a) { return std::log2(a); }
PAGEDKV_PTX float sin(float a) { return std::sin(a); }
PAGEDKV_PTX float cos(float a) { return std::cos(a); }
PAGEDKV_PTX float tanh(float a) { return std::tanh(a); }

template <class T>
  requires is_half_v<T>
PAGEDKV_PTX T ex2(T a) {
  return narrow<T>(ex2(to_float(a)));
}
template <class T>
  requires is_half_v<T>
PAGEDKV_PTX T tanh(T a) {
  return narrow<T>(tanh(to_float(a)));
}

// An instruction on both halves of a register.
template <class T, class Operation, class... Registers>
PAGEDKV_PTX uint32_t per_half(Operation operation, Registers... registers) {
  const uint32_t low = operation(T{static_cast<uint16_t>(registers)}...).bits;
  const uint32_t high = operation(T{static_cast<uint16_t>(registers >> 16)}...).bits;
  return low | high << 16;
}

// ---- Conversions
// --------------------------------------------------------------------------------------------------

// Numbers beyond the range of an integer become its nearest end, NaN becomes 0.
template <class To, class From>
PAGEDKV_PTX To convert(From value) {
  if constexpr (is_half_v<From>) {
    return convert<To>(to_float(value));
  } else if constexpr (is_half_v<To>) {
    return narrow<To>(static_cast<float>(value));
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    if (value != value) return 0;
    // The first number beyond the range is a power of two, which a floating-point number can be.
    constexpr From BEYOND = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * 2;
    if (value >= BEYOND) return std::numeric_limits<To>::max();
    if (value < static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    return static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

// cvt.sat between integers: the nearest that To can hold.
template <class To, class From>
PAGEDKV_PTX To convert_saturated(From value) {
  if (std::cmp_less(value, std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (std::cmp_greater(value, std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(value);
}

// cvt.sat of a floating-point number: within [0, 1], NaN becomes 0.
PAGEDKV_PTX float saturate(float a) { return std::fmin(std::fmax(a, 0.0f), 1.0f); }

// Two numbers as one register of 16-bit or 8-bit halves, the first in the upper one.
template <class T>
PAGEDKV_PTX uint32_t pack(float high, float low) {
  return uint32_t{narrow<T>(high).bits} << 16 | narrow<T>(low).bits;
}
template <class T>
PAGEDKV_PTX uint16_t pack_float8(float high, float low) {
  return static_cast<uint16_t>(from_float<T>(high).bits << 8 | from_float<T>(low).bits);
}
template <class T, class Half>
PAGEDKV_PTX uint16_t narrow_halves(uint32_t halves) {
  return pack_float8<T>(to_float(Half{static_cast<uint16_t>(halves >> 16)}),
                        to_float(Half{static_cast<uint16_t>(halves)}));
}
template <class T, class Half>
PAGEDKV_PTX uint32_t widen_float8(uint16_t two) {
  return pack<Half>(to_float(T{static_cast<uint8_t>(two >> 8)}), to_float(T{static_cast<uint8_t>(two)}));
}

// ---- Threads
// ------------------------------------------------------------------------------------------------------

// shfl.sync, clamp and segment mask included; `*in_range` is its predicate.
uint32_t shfl(ShuffleMode mode, uint32_t value, uint32_t operand, uint32_t clamp_and_segment, uint32_t mask,
              bool* in_range, Place place = Place::current());

PAGEDKV_PTX uint32_t vote_ballot(bool predicate, uint32_t mask, Place place = Place::current()) {
  return ballot("vote.sync", mask, predicate, place);
}
PAGEDKV_PTX bool vote_any(bool predicate, uint32_t mask, Place place = Place::current()) {
  return ballot("vote.sync", mask, predicate, place) != 0;
}
PAGEDKV_PTX bool vote_all(bool predicate, uint32_t mask, Place place = Place::current()) {
  return ballot("vote.sync", mask, !predicate, place) == 0;
}
template <class T>
PAGEDKV_PTX T redux(ReduceMode mode, T value, uint32_t mask, Place place = Place::current()) {
  return static_cast<T>(reduce(mode, mask, value, "redux.sync", place));
}
PAGEDKV_PTX uint32_t match(uint64_t bits, uint32_t mask, Place place = Place::current()) {
  return match_any(mask, bits, place);
}

PAGEDKV_PTX void bar_warp(uint32_t mask, Place place = Place::current()) {
  warp_collective(mask, "bar.warp.sync", nullptr, nullptr, MemoryOrder::fence, place);
}
// Returns the number of threads with a true predicate. Only barrier 0, which is the whole CTA's.
PAGEDKV_PTX uint32_t bar(uint32_t barrier, bool predicate, Place place = Place::current()) {
  if (barrier != 0) fault(place, "barrier %u; supported: barrier 0 of the whole CTA", barrier);
  return static_cast<uint32_t>(cta_barrier("bar.sync", predicate, place));
}

PAGEDKV_PTX uint32_t lane_bit() { return 1u << current_thread->lane_idx; }

}  // namespace pagedkv::emulator::ptx
