// Launches kernels on host devices: the blocks of all local ranks at once, on threads that wait for work.
// Knows nothing of collectives or of Python. Compiled once; kernels are separate objects.
#include "host.h"

namespace gar {

// A worker spins this long for the next call of a loop before it sleeps; more would starve the ranks that share its
// core.
static constexpr int kIdleSpins = 2000;

Workers::Workers(bool spin) : spin_(spin) {}

Workers::~Workers() { stop(); }

void Workers::stop() {
  for (auto& worker : workers_) {
    {
      std::lock_guard<std::mutex> lock(worker->mutex);
      worker->stop = true;
    }
    worker->wake.notify_one();
    worker->thread.join();
  }
  workers_.clear();
}

void Workers::serve(Worker* worker) {
  for (;;) {
    for (int i = 0; spin_ && i < kIdleSpins && !worker->task.load(std::memory_order_acquire); ++i) sched_yield();
    const Task* task = worker->task.load(std::memory_order_acquire);
    if (task == nullptr) {
      std::unique_lock<std::mutex> lock(worker->mutex);
      worker->wake.wait(lock, [&] { return worker->stop || worker->task.load(std::memory_order_acquire); });
      if (worker->stop) return;
      continue;
    }
    const bool succeeded = task->kernel(task->args, &task->block);
    if (!succeeded) failed_.store(true, std::memory_order_relaxed);
    worker->task.store(nullptr, std::memory_order_relaxed);
    pending_.fetch_sub(1, std::memory_order_release);
  }
}

bool Workers::run(const GarLaunch* launches, uint32_t count) {
  if (count == 1 && launches->nblocks == 1) {
    const Block block = {0, 1, 0, nullptr};
    return launches->kernel(launches->args, &block);
  }
  std::lock_guard<std::mutex> one_at_a_time(mutex_);
  tasks_.clear();
  for (uint32_t i = 0; i < count; ++i)
    for (uint32_t b = 0; b < launches[i].nblocks; ++b)
      tasks_.push_back({launches[i].kernel, launches[i].args, {b, launches[i].nblocks, 0, nullptr}});
  while (workers_.size() + 1 < tasks_.size()) {
    workers_.reserve(workers_.size() + 1);  // from here on only the thread itself can be refused
    std::unique_ptr<Worker> made(new Worker);
    Worker* worker = made.get();
    worker->thread = std::thread([this, worker] { serve(worker); });
    workers_.push_back(std::move(made));
  }
  failed_.store(false, std::memory_order_relaxed);
  pending_.store(int(tasks_.size()) - 1, std::memory_order_relaxed);
  for (size_t i = 1; i < tasks_.size(); ++i) {
    Worker* worker = workers_[i - 1].get();
    {
      std::lock_guard<std::mutex> lock(worker->mutex);
      worker->task.store(&tasks_[i], std::memory_order_release);
    }
    worker->wake.notify_one();
  }
  if (!tasks_[0].kernel(tasks_[0].args, &tasks_[0].block)) failed_.store(true, std::memory_order_relaxed);
  // Kernels end within their own limits, and all of them end at about the same time.
  while (pending_.load(std::memory_order_acquire) > 0) sched_yield();
  return !failed_.load(std::memory_order_relaxed);
}

}  // namespace gar
