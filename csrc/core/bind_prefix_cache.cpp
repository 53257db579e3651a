#include <stdexcept>

#include "core/bindings.h"
#include "core/prefix_cache.h"

namespace py = pybind11;

namespace pagedkv {

// Keys cross as digests do, each word with its highest byte first.
BlockKey key_from_bytes(const py::bytes& bytes) {
  const std::string_view view = bytes;
  BlockKey key;
  if (view.size() != sizeof(key)) {
    throw std::invalid_argument("a key has 32 bytes, got " + std::to_string(view.size()));
  }
  for (size_t i = 0; i < key.size(); ++i) {
    key[i] = 0;
    for (size_t byte = 4 * i; byte < 4 * i + 4; ++byte)
      key[i] = key[i] << 8 | static_cast<uint8_t>(view[byte]);
  }
  return key;
}

namespace {

py::bytes key_to_bytes(const BlockKey& key) {
  std::string bytes;
  for (const uint32_t word : key) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(word >> shift));
  }
  return py::bytes(bytes);
}

py::bytes compress(const py::bytes& state, const py::bytes& chunks, bool native) {
  BlockKey key = key_from_bytes(state);
  const std::string_view view = chunks;
  if (view.size() % SHA256_CHUNK_BYTES != 0) throw std::invalid_argument("chunks have 64 bytes each");
  if (native && !sha256_is_native()) throw std::invalid_argument("this CPU has no SHA-256 instructions");
  const auto* data = reinterpret_cast<const uint8_t*>(view.data());
  (native ? sha256_compress_native : sha256_compress_portable)(key, data, view.size() / SHA256_CHUNK_BYTES);
  return key_to_bytes(key);
}

}  // namespace

void bind_prefix_cache(py::module_& module) {
  module.def("sha256_is_native", &sha256_is_native, "Whether the CPU has instructions for SHA-256.");
  module.def("sha256_compress", &compress, py::arg("state"), py::arg("chunks"), py::arg("native"),
             "The SHA-256 compression function: the 32-byte state after some chunks of 64 bytes.");
  module.def(
      "extend_key",
      [](const py::bytes& parent, const py::object& token_ids) {
        return key_to_bytes(extend_key(key_from_bytes(parent), to_ints(token_ids, "token_ids")));
      },
      py::arg("parent"), py::arg("token_ids"),
      "The key of a block of these tokens, behind the blocks (or the root) whose key is `parent`.");
}

}  // namespace pagedkv
