// Peer access that lies, as behind some IOMMUs: the driver grants it and copies work, but what kernels store never
// arrives, and what they load is something else. EMULATED_GPU_LYING_PEERS=0-3,1-2 names the pairs of GPUs.
// Knows nothing of kernels but that their parameters hold addresses.
#include "driver_lies.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <set>
#include <utility>

#include "driver_memory.h"

namespace emulated {

static std::set<std::pair<int, int>> read_pairs() {
  std::set<std::pair<int, int>> pairs;
  const char* text = std::getenv("EMULATED_GPU_LYING_PEERS");
  int a = 0, b = 0, used = 0;
  while (text != nullptr && std::sscanf(text, "%d-%d%n", &a, &b, &used) == 2) {
    pairs.insert({a, b});
    pairs.insert({b, a});
    text += used;
    if (*text == ',') ++text;
  }
  return pairs;
}

// Where accesses of a GPU to an allocation go instead: zeros at first. Addresses are never given out twice.
static uintptr_t shadow_of(int gpu, const Allocation& allocation) {
  static auto& shadows = *new std::map<std::pair<int, uintptr_t>, uintptr_t>;
  uintptr_t& shadow = shadows[{gpu, allocation.base}];
  if (shadow == 0) {
    const size_t bytes = allocation.bytes + kPageBytes;
    void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    shadow = uintptr_t(pages);
  }
  return shadow;
}

void mislead(const Context& context, void* params, size_t bytes) {
  static const auto& pairs = *new std::set<std::pair<int, int>>(read_pairs());
  if (pairs.empty()) return;
  const int gpu = device_of(context).gpu;
  char* words = static_cast<char*>(params);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    uintptr_t word;
    memcpy(&word, words + i, 8);
    const AllocationPtr found = find_allocation(word);
    if (found == nullptr || (found->kind != Kind::kDevice && found->kind != Kind::kImported)) continue;
    const int owner = state().devices[size_t(found->device)]->gpu;
    if (pairs.count({gpu, owner}) == 0) continue;
    word = shadow_of(gpu, *found) + (word - found->base);
    memcpy(words + i, &word, 8);
  }
}

}  // namespace emulated
