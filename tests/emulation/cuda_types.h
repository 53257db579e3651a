// CUDA's built-in vector types and dim3, with CUDA's alignment, for a host compiler without the toolkit.
#pragma once

#include <cstdint>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
};

// The types TYPE1 .. TYPE4 of one scalar, and make_TYPE1 .. make_TYPE4. A vector of 2 or 4 is aligned to its
// size, up to the 16 bytes of the widest access; a vector of 3 has the alignment of its scalar.
#define PAGEDKV_DEFINE_VECTORS(type, scalar)                                                        \
  struct type##1 { scalar x; };                                                                     \
  struct alignas(2 * sizeof(scalar)) type##2 { scalar x, y; };                                      \
  struct type##3 { scalar x, y, z; };                                                               \
  struct alignas(4 * sizeof(scalar) < 16 ? 4 * sizeof(scalar) : 16) type##4 { scalar x, y, z, w; }; \
  constexpr type##1 make_##type##1(scalar x) { return {x}; }                                        \
  constexpr type##2 make_##type##2(scalar x, scalar y) { return {x, y}; }                           \
  constexpr type##3 make_##type##3(scalar x, scalar y, scalar z) { return {x, y, z}; }              \
  constexpr type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

PAGEDKV_DEFINE_VECTORS(char, signed char)
PAGEDKV_DEFINE_VECTORS(uchar, unsigned char)
PAGEDKV_DEFINE_VECTORS(short, short)
PAGEDKV_DEFINE_VECTORS(ushort, unsigned short)
PAGEDKV_DEFINE_VECTORS(int, int)
PAGEDKV_DEFINE_VECTORS(uint, unsigned)
PAGEDKV_DEFINE_VECTORS(longlong, long long)
PAGEDKV_DEFINE_VECTORS(ulonglong, unsigned long long)
PAGEDKV_DEFINE_VECTORS(float, float)
PAGEDKV_DEFINE_VECTORS(double, double)

#undef PAGEDKV_DEFINE_VECTORS
