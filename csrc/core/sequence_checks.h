// Checks of arguments that several functions of `Sequences` share. Each throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pagedkv {

// "list[index]", to name an entry.
inline std::string entry(const char* list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

inline void require_same_length(size_t num_ids, size_t num_values, const char* values) {
  if (num_ids == num_values) return;
  throw std::invalid_argument(std::string(values) + " has " + std::to_string(num_values) + " entries for " +
                              std::to_string(num_ids) + " sequences");
}

inline void require_count(int64_t count, const char* name) {
  if (count >= 0) return;
  throw std::invalid_argument(std::string(name) + " must not be negative, got " + std::to_string(count));
}

inline void require_count(int64_t count, const char* list, size_t index) {
  if (count < 0) require_count(count, entry(list, index).c_str());
}

}  // namespace pagedkv
