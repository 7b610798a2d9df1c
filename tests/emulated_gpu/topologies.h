// The emulated machines: which GPUs there are, how they are linked, and which can reach which.
// Knows nothing of drivers; the stand-ins of the driver, of NVML and of NCCL all read it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace emulated {

constexpr int kDefaultGpus = 8;
constexpr int kDefaultMultiprocessors = 132;
constexpr uint64_t kMemoryBytes = 80ull << 30;

struct Topology {
  const char* name;
  const char* device_name;
  int gpus;            // a larger machine repeats the topology, a smaller one cuts it
  bool nvswitch;       // NVLinks go to a switch that joins all GPUs
  int nvlink_version;  // 0: none
  int nvlink_links;    // of a GPU to the switch, or of a pair
  int pcie_generation;
  int pcie_width;
  int numa_nodes;
};

inline constexpr Topology kTopologies[] = {
    {"nvswitch8", "Emulated H100 SXM", 8, true, 4, 18, 5, 16, 2},
    {"pcie4", "Emulated L40", 4, false, 0, 0, 4, 16, 1},
    {"islands2", "Emulated A100 island", 4, false, 3, 12, 4, 16, 2},
    {"partial", "Emulated A40", 4, false, 0, 0, 4, 16, 1},
};

// The topology of that name, or nullptr.
inline const Topology* find_topology(const char* name) {
  for (const Topology& topology : kTopologies)
    if (std::strcmp(topology.name, name) == 0) return &topology;
  return nullptr;
}

// What EMULATED_GPU_TOPOLOGY asks for; nullptr when there is no such topology.
inline const Topology* chosen_topology() {
  const char* name = std::getenv("EMULATED_GPU_TOPOLOGY");
  return name == nullptr || *name == 0 ? &kTopologies[0] : find_topology(name);
}

// Number of GPUs: EMULATED_GPUS, else as many as the topology has.
inline int chosen_gpus(const Topology& topology) {
  const char* text = std::getenv("EMULATED_GPUS");
  return text == nullptr || *text == 0 ? topology.gpus : std::atoi(text);
}

inline bool same_island(int a, int b) { return a / 2 == b / 2; }

// Number of NVLinks between two GPUs, through the switch or directly.
inline int nvlinks_between(const Topology& topology, int a, int b) {
  if (a == b || topology.nvlink_version == 0) return 0;
  return topology.nvswitch || same_island(a, b) ? topology.nvlink_links : 0;
}

// Whether GPU a may address the memory of GPU b.
inline bool has_peer_access(const Topology& topology, int a, int b) {
  if (a == b) return false;
  if (std::strcmp(topology.name, "islands2") == 0) return same_island(a, b);
  if (std::strcmp(topology.name, "partial") == 0) return !((a == 0 && b == 3) || (a == 3 && b == 0));
  return true;
}

inline int numa_node(const Topology& topology, int gpu) {
  return (gpu % topology.gpus) * topology.numa_nodes / topology.gpus;
}

inline int pci_bus(int gpu) { return 0x10 + gpu; }

// The 16 bytes of a GPU's UUID.
inline void uuid_bytes(int gpu, unsigned char out[16]) {
  const unsigned char pattern[16] = {0, 0, 0, 0, 0xe8, 0xa1, 0x4d, 0x00, 0x90, 0x00, 0, 0, 0, 0, 0, 0};
  std::memcpy(out, pattern, 16);
  for (int i = 0; i < 4; ++i) out[i] = out[12 + i] = static_cast<unsigned char>(uint32_t(gpu) >> (8 * (3 - i)));
}

// The UUID as nvidia-smi prints it.
inline std::string uuid_text(int gpu) {
  char text[48];
  std::snprintf(text, sizeof text, "GPU-%08x-e8a1-4d00-9000-0000%08x", unsigned(gpu), unsigned(gpu));
  return text;
}

inline std::string pci_bus_id(int gpu) {
  char text[16];
  std::snprintf(text, sizeof text, "0000:%02X:00.0", unsigned(pci_bus(gpu)));
  return text;
}

}  // namespace emulated
