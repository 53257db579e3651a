#include "core/sha256.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pagedkv {

namespace {

alignas(16) constexpr uint32_t ROUND_CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

}  // namespace

void sha256_compress_portable(Sha256State& state, const uint8_t* chunks, size_t num_chunks) {
  for (; num_chunks > 0; --num_chunks, chunks += SHA256_CHUNK_BYTES) {
    uint32_t schedule[64];
    for (int i = 0; i < 16; ++i) schedule[i] = load_big_endian(chunks + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t early = schedule[i - 15], late = schedule[i - 2];
      schedule[i] = schedule[i - 16] + schedule[i - 7] +
                    (std::rotr(early, 7) ^ std::rotr(early, 18) ^ early >> 3) +
                    (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                          ROUND_CONSTANTS[i] + schedule[i];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const Sha256State added = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += added[i];
  }
}

#if defined(__x86_64__)

bool sha256_is_native() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const bool has_sse41_ssse3 = (ecx & bit_SSE4_1) != 0 && (ecx & bit_SSSE3) != 0;
  return has_sse41_ssse3 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_SHA) != 0;
}

// The instructions keep the state as (a, b, e, f) and (c, d, g, h), highest word first, and do two rounds
// each.
__attribute__((target("sha,sse4.1,ssse3"))) void sha256_compress_native(Sha256State& state,
                                                                        const uint8_t* chunks,
                                                                        size_t num_chunks) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data()));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4));
  const __m128i badc = _mm_shuffle_epi32(dcba, 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
  __m128i abef = _mm_alignr_epi8(badc, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, badc, 0xf0);

  for (; num_chunks > 0; --num_chunks, chunks += SHA256_CHUNK_BYTES) {
    const __m128i old_abef = abef, old_cdgh = cdgh;
    __m128i words[4];  // the latest 16 words of the message schedule
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i < 4) {
        const auto* source = reinterpret_cast<const __m128i*>(chunks + 16 * i);
        words[i] = _mm_shuffle_epi8(_mm_loadu_si128(source), big_endian);
      } else {
        const __m128i w16 = words[i % 4], w12 = words[(i + 1) % 4], w8 = words[(i + 2) % 4],
                      w4 = words[(i + 3) % 4];
        const __m128i early = _mm_add_epi32(_mm_sha256msg1_epu32(w16, w12), _mm_alignr_epi8(w4, w8, 4));
        words[i % 4] = _mm_sha256msg2_epu32(early, w4);
      }
      const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(ROUND_CONSTANTS + 4 * i));
      const __m128i input = _mm_add_epi32(words[i % 4], constants);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, input);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(input, 0x0e));
    }
    abef = _mm_add_epi32(abef, old_abef);
    cdgh = _mm_add_epi32(cdgh, old_cdgh);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#else

bool sha256_is_native() { return false; }

void sha256_compress_native(Sha256State& state, const uint8_t* chunks, size_t num_chunks) {
  sha256_compress_portable(state, chunks, num_chunks);
}

#endif

void sha256_compress(Sha256State& state, const uint8_t* chunks, size_t num_chunks) {
  static const bool native = sha256_is_native();
  (native ? sha256_compress_native : sha256_compress_portable)(state, chunks, num_chunks);
}

}  // namespace pagedkv
