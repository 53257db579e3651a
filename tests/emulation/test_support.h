// A test is a function that registers itself; a failed check prints its line and the program exits with 1.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace pagedkv::emulator::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> registered;
  return registered;
}

inline int num_failures = 0;

inline bool report(bool passed, const char* file, int line, const std::string& what) {
  if (!passed) {
    ++num_failures;
    std::printf("%s:%d: %s\n", file, line, what.c_str());
  }
  return passed;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

}  // namespace pagedkv::emulator::testing

#define TEST(name)                                                                      \
  static void name();                                                                   \
  static const pagedkv::emulator::testing::Registration name##_registered(#name, name); \
  static void name()

#define CHECK(condition) \
  pagedkv::emulator::testing::report((condition), __FILE__, __LINE__, "not true: " #condition)

#define CHECK_CONTAINS(text, part)                                                                          \
  pagedkv::emulator::testing::report(std::string(text).find(part) != std::string::npos, __FILE__, __LINE__, \
                                     "'" + std::string(part) + "' is not in: " + std::string(text))
