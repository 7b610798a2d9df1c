// The host runtime's own types: a launch, the threads that run one.
// Knows nothing of Python (host_python.cpp does).
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "platform_host.cuh"

typedef int (*GarKernel)(const GarArgs* args, const gar::Block* block);

struct GarLaunch {
  GarKernel kernel;
  const GarArgs* args;
  uint32_t nblocks;
};

namespace gar {

// NOTE residency. Blocks of all local ranks wait for each other inside a call, so each runs on a thread of its own,
// the first on the caller's; there are always as many threads as blocks.
class Workers {
 public:
  explicit Workers(bool spin);
  ~Workers();
  Workers(const Workers&) = delete;
  // Runs all blocks of all launches to their end. False if any gave up. Throws, before any block runs, if the system
  // gives no thread for one.
  bool run(const GarLaunch* launches, uint32_t count);
  // Ends the threads; a later run makes new ones. No run may be going on.
  void stop();

 private:
  struct Task {
    GarKernel kernel;
    const GarArgs* args;
    Block block;
  };
  struct Worker {
    std::thread thread;
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<const Task*> task{nullptr};
    bool stop = false;
  };
  void serve(Worker* worker);

  const bool spin_;
  std::mutex mutex_;
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<int> pending_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace gar
