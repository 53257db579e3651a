// Functions of a whole vector, written once for every instruction set.
#pragma once

namespace pagedkv::cpu {
namespace {  // each instruction set has a copy of its own

inline constexpr float LOG2_E = 1.44269504088896341f;
inline constexpr float LN_2 = 0.693147180559945309f;

// 2**x for x <= 0, within 1e-7 of it: exactly 1 at 0, exactly 0 far below, NaN for NaN. x is split into a
// whole number and a rest in [-1/2, 1/2], for which a polynomial is fitted (least relative error, constant
// term 1).
template <class Isa>
typename Isa::Float exp2_of(typename Isa::Float x) {
  using Float = typename Isa::Float;
  x = Isa::max(Isa::set(Isa::SMALLEST_EXPONENT), x);
  const Float whole = Isa::round(x), rest = Isa::sub(x, whole);
  Float y = Isa::fma(Isa::set(0.00132647272f), rest, Isa::set(0.00967151281f));
  y = Isa::fma(y, rest, Isa::set(0.0555073374f));
  y = Isa::fma(y, rest, Isa::set(0.240222421f));
  y = Isa::fma(y, rest, Isa::set(0.693146978f));
  y = Isa::fma(y, rest, Isa::set(1.0f));
  return Isa::scale_by_power(y, whole);
}

template <class Isa>
float exp2_of(float x) {
  return Isa::first_lane(exp2_of<Isa>(Isa::set(x)));
}

// 2**(x * factor) for x <= 0, faster: for weights, of which there are many. 0 below 2**-126. DEGREE 4 is
// within 3e-6, for weights that are rounded to bfloat16; 5 within 1e-7. Adding MAGIC rounds to a whole number
// and leaves it, with the bias of an exponent, in the low bits of the sum.
template <class Isa, int DEGREE>
typename Isa::Float weight_of(typename Isa::Float x, typename Isa::Float factor) {
  using Float = typename Isa::Float;
  static_assert(DEGREE == 4 || DEGREE == 5);
  const Float magic = Isa::set(0x1.8p23f + 127.0f), moved = Isa::fma(x, factor, magic);
  const Float whole = Isa::sub(moved, magic), rest = Isa::fms(x, factor, whole);
  Float y;
  if constexpr (DEGREE == 4) {
    y = Isa::fma(Isa::set(0.00958285322f), rest, Isa::set(0.0559064262f));
    y = Isa::fma(y, rest, Isa::set(0.240240986f));
    y = Isa::fma(y, rest, Isa::set(0.693124193f));
  } else {
    y = Isa::fma(Isa::set(0.00132647272f), rest, Isa::set(0.00967151281f));
    y = Isa::fma(y, rest, Isa::set(0.0555073374f));
    y = Isa::fma(y, rest, Isa::set(0.240222421f));
    y = Isa::fma(y, rest, Isa::set(0.693146978f));
  }
  y = Isa::fma(y, rest, Isa::set(1.0f));
  return Isa::zero_below(whole, -126.0f, Isa::mul(y, Isa::power_in_low_bits(moved)));
}

// tanh by a polynomial near 0, where 1 - 2 / (e**2x + 1) would lose its digits (Moshier, Cephes, tanhf).
template <class Isa>
typename Isa::Float tanh_of(typename Isa::Float x) {
  using Float = typename Isa::Float;
  const Float size = Isa::abs(x), square = Isa::mul(x, x);
  Float y = Isa::fma(Isa::set(-5.70498872745e-3f), square, Isa::set(2.06390887954e-2f));
  y = Isa::fma(y, square, Isa::set(-5.37397155531e-2f));
  y = Isa::fma(y, square, Isa::set(1.33314422036e-1f));
  y = Isa::fma(y, square, Isa::set(-3.33332819422e-1f));
  const Float near = Isa::fma(Isa::mul(y, square), x, x);
  // With e**-2x, which is at most 1: (1 - e**-2x) / (1 + e**-2x).
  const Float power = exp2_of<Isa>(Isa::mul(size, Isa::set(-2.0f * LOG2_E)));
  const Float far = Isa::div(Isa::sub(Isa::set(1.0f), power), Isa::add(Isa::set(1.0f), power));
  return Isa::select_less(size, Isa::set(0.625f), near, Isa::copy_sign(far, x));
}

}  // namespace
}  // namespace pagedkv::cpu
