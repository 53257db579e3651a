// The few words that the C++ tests need: checks that stay on in release builds, and a summary as exit code.
#pragma once

#include <cstdio>
#include <exception>

namespace pagedkv::test {

inline int num_failures = 0;

inline void check(bool holds, const char* expression, const char* file, int line) {
  if (holds) return;
  ++num_failures;
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, expression);
}

// Whether `call` throws an Error (or a class derived from it).
template <class Error, class Call>
bool throws(Call&& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "another exception was thrown: %s\n", error.what());
  }
  return false;
}

}  // namespace pagedkv::test

#define CHECK(expression) ::pagedkv::test::check((expression), #expression, __FILE__, __LINE__)
