// What all parts of the stand-in driver share: settings, devices, contexts, and how an entry point begins.
// Knows nothing of how streams run or memory is mapped; those have headers of their own.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "topologies.h"

#define EMULATED_API extern "C" __attribute__((visibility("default")))

namespace emulated {

constexpr int kDriverVersion = 13000;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kThreadsPerBlock = 1024;
constexpr int kSharedBytesPerMultiprocessor = 228 << 10;
constexpr int kSharedBytesPerBlock = 48 << 10;
constexpr int kSharedBytesPerBlockOptin = 227 << 10;
constexpr int kReservedSharedBytes = 1 << 10;

struct Stream;
struct Pool;
struct Capture;
struct Done;
using StreamPtr = std::shared_ptr<Stream>;

struct Settings {
  const Topology* topology = nullptr;
  int gpus = 0;
  int multiprocessors = kDefaultMultiprocessors;
  uint64_t seed = 0;
  uint32_t delay_us = 200;
  bool ipc = true;
  bool strict_sync = false;
};

// The multiprocessors of one GPU: who is on them, and who waits to get on. Has a lock of its own.
struct Residency {
  std::mutex lock;
  std::condition_variable changed;
  int64_t free_threads = 0;
  uint64_t next_ticket = 0;
  uint64_t serving = 0;
};

struct Context {
  int device = 0;  // ordinal in this process
  bool primary = false;
  bool alive = false;
  unsigned flags = 0;
  std::atomic<int> error{0};    // sticky CUresult
  std::set<Context*> peers;     // contexts whose memory this one may address
  StreamPtr legacy;             // the NULL stream
  std::set<StreamPtr> streams;  // all others
  std::map<std::thread::id, StreamPtr> per_thread;
  std::vector<std::pair<std::shared_ptr<Done>, bool>> orphans;  // last work of destroyed streams; whether they blocked
};

struct Device {
  int gpu = 0;  // number in the machine, whatever CUDA_VISIBLE_DEVICES hides
  Context primary;
  unsigned primary_references = 0;
  unsigned primary_flags = 0;
  uint64_t used_bytes = 0;
  Residency residency;
  std::unique_ptr<Pool> default_pool;
  Pool* pool = nullptr;  // what cuMemAllocAsync takes from
};

// Everything the driver knows. Made once and never destroyed: threads may outlive main().
struct State {
  std::mutex lock;
  std::atomic<bool> initialized{false};
  std::atomic<bool> forked{false};
  Settings settings;
  std::vector<std::unique_ptr<Device>> devices;
  std::set<Context*> contexts;
  std::vector<Capture*> captures;
  uint64_t next_id = 1;
};

State& state();
std::vector<CUcontext>& context_stack();
bool& in_host_function();

using Lock = std::unique_lock<std::mutex>;

// What every entry point but a few asks first.
CUresult check_initialized();

// The current context, alive and without a sticky error. Takes no lock.
CUresult current_context(Context** out);

// A context by its handle.
CUresult find_context(CUcontext handle, Context** out);

Device& device_of(const Context& context);

// A device by its ordinal in this process.
CUresult find_device(CUdevice ordinal, Device** out);

// Ends the context's work, and frees what belongs to it.
void tear_down(Context& context);

// Called under the lock when a context starts to be used.
void bring_up(Context& context);

}  // namespace emulated

#define RETURN_IF_ERROR(expression)              \
  do {                                           \
    const CUresult result_ = (expression);       \
    if (result_ != CUDA_SUCCESS) return result_; \
  } while (0)

#define ENTER() RETURN_IF_ERROR(emulated::check_initialized())

#define ENTER_CONTEXT(name)          \
  emulated::Context* name = nullptr; \
  ENTER();                           \
  RETURN_IF_ERROR(emulated::current_context(&name))
