#include "launch_record.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <tuple>

namespace pagedkv::emulator {

void record_launch(const void* kernel, const LaunchShape& shape) {
  const char* file_name = std::getenv("PAGEDKV_EMULATOR_LAUNCHES");
  if (file_name == nullptr || kernel == nullptr) return;
  static std::mutex mutex;
  static std::set<std::tuple<const void*, unsigned, size_t>> recorded;
  const std::lock_guard lock(mutex);
  const unsigned num_threads = shape.cta.x * shape.cta.y * shape.cta.z;
  if (!recorded.insert({kernel, num_threads, shape.shared_bytes}).second) return;
  Dl_info object;
  std::FILE* file = dladdr(kernel, &object) != 0 ? std::fopen(file_name, "a") : nullptr;
  if (file == nullptr) return;  // then the kernel counts as never launched
  const auto offset = static_cast<const char*>(kernel) - static_cast<const char*>(object.dli_fbase);
  std::fprintf(file, "source %s %tx %u %zu\n", object.dli_fname, offset, num_threads, shape.shared_bytes);
  std::fclose(file);  // one write for the line, so that lines of several processes do not mix
}

void record_replacement(const Replacement& replacement) {
  const char* file_name = std::getenv("PAGEDKV_EMULATOR_LAUNCHES");
  if (file_name == nullptr) return;
  static std::mutex mutex;
  static std::set<const void*> recorded;
  const std::lock_guard lock(mutex);
  if (!recorded.insert(reinterpret_cast<const void*>(replacement.body)).second) return;
  std::FILE* file = std::fopen(file_name, "a");
  if (file == nullptr) return;
  std::fprintf(file, "ptx_%d %s\n", replacement.architecture, replacement.name);
  std::fclose(file);
}

}  // namespace pagedkv::emulator
