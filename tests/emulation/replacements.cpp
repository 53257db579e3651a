// Kernels that run in another form than the one this library was compiled from.
#include <cstdlib>
#include <iterator>
#include <map>
#include <string>
#include <unordered_map>

#include "emulator.h"
#include "launch_record.h"

namespace pagedkv::emulator {
namespace {

using Versions = std::map<int, Replacement>;  // by architecture

// Filled while the library is loaded, read afterwards.
std::unordered_map<const void*, Versions>& replacements() {
  static std::unordered_map<const void*, Versions> registered;
  return registered;
}

int chosen_architecture() {
  const char* value = std::getenv("PAGEDKV_EMULATOR_ARCHITECTURE");
  return value == nullptr ? 80 : std::atoi(value);
}

}  // namespace

void replace_kernel(const void* kernel, const Replacement& replacement) {
  replacements()[kernel].insert_or_assign(replacement.architecture, replacement);
}

bool has_replacements() { return !replacements().empty(); }

cudaError_t run_replaced(const LaunchShape& shape, const void* kernel, const void* params) {
  const Versions& versions = replacements()[kernel];
  const auto later = versions.upper_bound(chosen_architecture());
  if (later == versions.begin()) {
    return report_error(cudaErrorLaunchFailure,
                        "a kernel without a replacement for the chosen architecture, where others have one");
  }
  const Replacement& replacement = std::prev(later)->second;
  const unsigned num_threads = shape.cta.x * shape.cta.y * shape.cta.z;
  if (replacement.max_threads > 0 && num_threads > replacement.max_threads) {
    return report_error(
        cudaErrorInvalidConfiguration,
        "invalid launch configuration: " + std::to_string(num_threads) +
            " threads a CTA; the kernel's __launch_bounds__: " + std::to_string(replacement.max_threads));
  }
  const auto* bytes = static_cast<const unsigned char*>(params);
  const cudaError_t error = run_grid(shape, [&] { replacement.body(bytes); });
  if (error == cudaSuccess) record_replacement(replacement);
  return error;
}

}  // namespace pagedkv::emulator
