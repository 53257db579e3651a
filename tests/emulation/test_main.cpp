// Runs every test, or those whose name contains the argument.
#include <cstdio>
#include <cstring>

#include "emulator.h"
#include "test_support.h"

int main(int argument_count, char** arguments) {
  using namespace pagedkv::emulator;
  int num_run = 0;
  for (const testing::Test& test : testing::tests()) {
    if (argument_count > 1 && std::strstr(test.name, arguments[1]) == nullptr) continue;
    set_options(Options{});
    const int failures_before = testing::num_failures;
    test.run();
    ++num_run;
    std::printf("%-60s %s\n", test.name, testing::num_failures == failures_before ? "ok" : "FAILED");
  }
  std::printf("%d tests, %d failed checks\n", num_run, testing::num_failures);
  return testing::num_failures == 0 && num_run > 0 ? 0 : 1;
}
