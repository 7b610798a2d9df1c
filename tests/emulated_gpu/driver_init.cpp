// cuInit: reads the settings and makes the devices that are visible.
// Knows nothing of what devices do.
#include <pthread.h>

#include <cstdio>

#include "driver_faults.h"
#include "driver_memory.h"
#include "driver_state.h"

namespace emulated {

State& state() {
  static State& only = *new State;
  return only;
}

bool& in_host_function() {
  static thread_local bool inside = false;
  return inside;
}

CUresult check_initialized() {
  const State& all = state();
  if (all.forked || !all.initialized) return CUDA_ERROR_NOT_INITIALIZED;
  return in_host_function() ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}

static uint64_t number_from(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == 0 ? otherwise : std::strtoull(text, nullptr, 10);
}

// What CUDA_VISIBLE_DEVICES leaves: GPU numbers in its order. An entry that is not known ends the list, as in CUDA.
static std::vector<int> visible_gpus(int gpus) {
  std::vector<int> visible;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int gpu = 0; gpu < gpus; ++gpu) visible.push_back(gpu);
    return visible;
  }
  std::string rest = text;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    std::string entry = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    while (!entry.empty() && entry.front() == ' ') entry.erase(0, 1);
    int found = -1;
    if (entry.rfind("GPU-", 0) == 0) {
      for (int gpu = 0; gpu < gpus; ++gpu)
        if (entry.size() > 4 && uuid_text(gpu).rfind(entry, 0) == 0) found = gpu;
    } else if (!entry.empty() && entry.find_first_not_of("0123456789") == std::string::npos) {
      found = std::atoi(entry.c_str());
    }
    bool repeated = false;
    for (const int gpu : visible) repeated = repeated || gpu == found;
    if (repeated) return {};
    if (found < 0 || found >= gpus) break;
    visible.push_back(found);
  }
  return visible;
}

static CUresult read_settings(Settings* settings) {
  settings->topology = chosen_topology();
  if (settings->topology == nullptr) {
    std::fprintf(stderr, "emulated GPU: EMULATED_GPU_TOPOLOGY=%s is no topology; topologies.h names them\n",
                 std::getenv("EMULATED_GPU_TOPOLOGY"));
    return CUDA_ERROR_INVALID_VALUE;
  }
  settings->gpus = chosen_gpus(*settings->topology);
  settings->multiprocessors = int(number_from("EMULATED_GPU_SMS", kDefaultMultiprocessors));
  settings->seed = number_from("EMULATED_GPU_SEED", 0);
  settings->delay_us = uint32_t(number_from("EMULATED_GPU_DELAY_US", 200));
  settings->ipc = number_from("EMULATED_GPU_IPC", 1) != 0;
  settings->strict_sync = number_from("EMULATED_GPU_STRICT_SYNC", 0) != 0;
  return CUDA_SUCCESS;
}

static void make_devices(State& all) {
  for (const int gpu : visible_gpus(all.settings.gpus)) {
    auto device = std::make_unique<Device>();
    device->gpu = gpu;
    device->primary.device = int(all.devices.size());
    device->primary.primary = true;
    device->residency.free_threads = int64_t(all.settings.multiprocessors) * kThreadsPerMultiprocessor;
    device->default_pool = std::make_unique<Pool>();
    device->default_pool->device = device.get();
    device->default_pool->ordinal = int(all.devices.size());
    device->default_pool->is_default = true;
    device->pool = device->default_pool.get();
    all.contexts.insert(&device->primary);
    all.devices.push_back(std::move(device));
  }
}

CUresult find_device(CUdevice ordinal, Device** out) {
  State& all = state();
  if (ordinal < 0 || ordinal >= int(all.devices.size())) return CUDA_ERROR_INVALID_DEVICE;
  *out = all.devices[size_t(ordinal)].get();
  return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  State& all = state();
  if (all.forked) return CUDA_ERROR_NOT_INITIALIZED;  // before the lock, which the parent may have held
  Lock lock(all.lock);
  if (all.initialized) return CUDA_SUCCESS;
  RETURN_IF_ERROR(read_settings(&all.settings));
  make_devices(all);
  if (all.devices.empty()) return CUDA_ERROR_NO_DEVICE;
  // Threads do not survive a fork, so nothing of the driver works in the child; as with a GPU.
  pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
  watch_faults();
  all.initialized = true;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

// Settings in words, for test logs.
EMULATED_API const char* emulated_gpu_describe() {
  static std::string& text = *new std::string;
  const Settings& settings = state().settings;
  Lock lock(state().lock);
  text = "emulated GPUs: ";
  if (!state().initialized) return (text += "not initialised").c_str();
  text += std::to_string(settings.gpus) + " of topology " + settings.topology->name + ", " +
          std::to_string(state().devices.size()) + " visible, " + std::to_string(settings.multiprocessors) +
          " multiprocessors, seed " + std::to_string(settings.seed) + ", delays up to " +
          std::to_string(settings.seed == 0 ? 0 : settings.delay_us) + " us, IPC " + (settings.ipc ? "on" : "off");
  return text.c_str();
}
