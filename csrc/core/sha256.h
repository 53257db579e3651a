// The SHA-256 compression function (FIPS 180-4, section 6.2.2), with the instructions of the CPU where it has
// them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pagedkv {

using Sha256State = std::array<uint32_t, 8>;

inline constexpr size_t SHA256_CHUNK_BYTES = 64;
inline constexpr Sha256State SHA256_INITIAL_STATE = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// Takes num_chunks chunks of 64 bytes into the state, one after the other.
void sha256_compress(Sha256State& state, const uint8_t* chunks, size_t num_chunks);

// The two ways to do it, for the tests. sha256_compress_native needs sha256_is_native().
bool sha256_is_native();
void sha256_compress_portable(Sha256State& state, const uint8_t* chunks, size_t num_chunks);
void sha256_compress_native(Sha256State& state, const uint8_t* chunks, size_t num_chunks);

}  // namespace pagedkv
