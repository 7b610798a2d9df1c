// The NVML stand-in: start and end, versions, and what each GPU is: names, numbers, addresses, memory, processors near
// it. Knows nothing of links between GPUs.
#include <unistd.h>

#include <mutex>
#include <vector>

#include "nvml_core.h"

namespace emulated_nvml {
namespace {

constexpr char kDriverVersion[] = "580.00.00";
constexpr char kNvmlVersion[] = "13.580.00.00";
constexpr int kCudaVersion = 13000;

std::mutex mutex;
int users = 0;
const emulated::Topology* machine = nullptr;
// Handles stay valid over a shutdown and a new start, hence these are never destroyed.
std::vector<EmulatedGpu*>& devices = *new std::vector<EmulatedGpu*>;
int device_count = 0;

nvmlReturn_t write_text(const std::string& text, char* out, unsigned length) {
  if (length <= text.size()) return NVML_ERROR_INSUFFICIENT_SIZE;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}

// Sets the bits [begin, end) that fit into the words.
void set_bits(unsigned long* words, unsigned count, int begin, int end) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::memset(words, 0, count * sizeof(unsigned long));
  for (int bit = begin; bit < end && bit < int(count) * kBits; ++bit) words[bit / kBits] |= 1ul << (bit % kBits);
}

}  // namespace

const emulated::Topology* topology() { return machine; }
int gpus() { return device_count; }
nvmlDevice_t device_of(int gpu) { return devices[size_t(gpu)]; }

nvmlPciInfo_t pci_info(unsigned bus, unsigned pci_device_id) {
  nvmlPciInfo_t info = {};
  info.bus = bus;
  info.pciDeviceId = pci_device_id;
  std::snprintf(info.busIdLegacy, sizeof info.busIdLegacy, "%04X:%02X:00.0", 0u, bus & 0xff);
  std::snprintf(info.busId, sizeof info.busId, "%08X:%02X:00.0", 0u, bus & 0xff);
  return info;
}

}  // namespace emulated_nvml

using namespace emulated_nvml;

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (users == 0) {
    const emulated::Topology* chosen = emulated::chosen_topology();
    if (chosen == nullptr) return NVML_ERROR_DRIVER_NOT_LOADED;
    device_count = emulated::chosen_gpus(*chosen);
    while (int(devices.size()) < device_count) devices.push_back(new EmulatedGpu{int(devices.size())});
    machine = chosen;
  }
  ++users;
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlInit_v2() { return nvmlInitWithFlags(0); }

NVML_API nvmlReturn_t nvmlShutdown() {
  const std::lock_guard<std::mutex> guard(mutex);
  if (users == 0) return NVML_ERROR_UNINITIALIZED;
  if (--users == 0) machine = nullptr;
  return NVML_SUCCESS;
}

NVML_API const char* nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS:
      return "Success";
    case NVML_ERROR_UNINITIALIZED:
      return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
      return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
      return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
      return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
      return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
  }
  return "Unknown Error";
}

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char* version, unsigned length) {
  return topology() ? write_text(kDriverVersion, version, length) : NVML_ERROR_UNINITIALIZED;
}

NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char* version, unsigned length) {
  return write_text(kNvmlVersion, version, length);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) {
  *version = kCudaVersion;
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return nvmlSystemGetCudaDriverVersion(version);
}

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  if (topology() == nullptr) return NVML_ERROR_UNINITIALIZED;
  *count = unsigned(gpus());
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  if (topology() == nullptr) return NVML_ERROR_UNINITIALIZED;
  if (index >= unsigned(gpus())) return NVML_ERROR_INVALID_ARGUMENT;
  *device = device_of(int(index));
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  if (topology() == nullptr) return NVML_ERROR_UNINITIALIZED;
  for (int gpu = 0; gpu < gpus(); ++gpu) {
    if (emulated::uuid_text(gpu) != uuid) continue;
    *device = device_of(gpu);
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

// Takes domain:bus:device.function in hexadecimal; the domain and the function may be left out, as in NVML.
NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, nvmlDevice_t* device) {
  if (topology() == nullptr) return NVML_ERROR_UNINITIALIZED;
  unsigned domain = 0, bus = 0, slot = 0;
  if (std::sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
    domain = 0;
    if (std::sscanf(bus_id, "%x:%x", &bus, &slot) != 2) return NVML_ERROR_INVALID_ARGUMENT;
  }
  for (int gpu = 0; gpu < gpus() && domain == 0 && slot == 0; ++gpu) {
    if (unsigned(emulated::pci_bus(gpu)) != bus) continue;
    *device = device_of(gpu);
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned* index) {
  RETURN_UNLESS_VALID(device, index);
  *index = unsigned(device->number);
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned* number) {
  return nvmlDeviceGetIndex(device, number);
}

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* name, unsigned length) {
  RETURN_UNLESS_VALID(device, name);
  return write_text(topology()->device_name, name, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned length) {
  RETURN_UNLESS_VALID(device, uuid);
  return write_text(emulated::uuid_text(device->number), uuid, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* info) {
  RETURN_UNLESS_VALID(device, info);
  *info = pci_info(unsigned(emulated::pci_bus(device->number)), kGpuPciId);
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  RETURN_UNLESS_VALID(device, major);
  *major = 9;
  *minor = 0;
  return NVML_SUCCESS;
}

// Other processes' allocations are not known here: all memory counts as free.
NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  RETURN_UNLESS_VALID(device, memory);
  *memory = {emulated::kMemoryBytes, emulated::kMemoryBytes, 0};
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  RETURN_UNLESS_VALID(device, memory);
  *memory = {memory->version, emulated::kMemoryBytes, 0, emulated::kMemoryBytes, 0};
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count, void*) {
  RETURN_UNLESS_VALID(device, count);
  *count = 0;
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, int* node) {
  RETURN_UNLESS_VALID(device, node);
  *node = emulated::numa_node(*topology(), device->number);
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long* nodes, unsigned) {
  RETURN_UNLESS_VALID(device, nodes);
  const int node = emulated::numa_node(*topology(), device->number);
  set_bits(nodes, words, node, node + 1);
  return NVML_SUCCESS;
}

// The emulated nodes share the machine's processors out in equal runs; with fewer processors than nodes all have all.
NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long* processors) {
  RETURN_UNLESS_VALID(device, processors);
  const int total = int(sysconf(_SC_NPROCESSORS_CONF));
  const int nodes = topology()->numa_nodes;
  const int node = emulated::numa_node(*topology(), device->number);
  if (total < nodes) {
    set_bits(processors, words, 0, total);
  } else {
    set_bits(processors, words, node * total / nodes, (node + 1) * total / nodes);
  }
  return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned words,
                                                          unsigned long* processors, unsigned) {
  return nvmlDeviceGetCpuAffinity(device, words, processors);
}
