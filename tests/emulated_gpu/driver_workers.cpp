// Keeps finished threads for the next task, without a limit: tasks wait for each other, so none may wait for a thread.
// Knows nothing of what they run.
#include "driver_workers.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace emulated {

static constexpr size_t kStackBytes = 2 << 20;

struct Worker {
  std::condition_variable wake;
  std::function<void()> task;
};

struct Workers {
  std::mutex lock;
  std::vector<Worker*> idle;
};

static Workers& workers() {
  static Workers& only = *new Workers;
  return only;
}

static void* enter(void* argument) {
  auto* body = static_cast<std::function<void()>*>(argument);
  (*body)();
  delete body;
  return nullptr;
}

void start_thread(std::function<void()> body) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // Faults of emulated device code must still come.
  sigset_t faults;
  sigemptyset(&faults);
  sigaddset(&faults, SIGSEGV);
  sigaddset(&faults, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &faults, nullptr);
  pthread_t thread;
  const int failed = pthread_create(&thread, &attributes, enter, new std::function<void()>(std::move(body)));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (failed == 0) return;
  std::fprintf(stderr, "emulated GPU: no thread could be started (error %d); run fewer blocks at once\n", failed);
  std::abort();
}

static void serve(Worker* worker) {
  Workers& all = workers();
  std::unique_lock<std::mutex> lock(all.lock);
  for (;;) {
    worker->wake.wait(lock, [&] { return worker->task != nullptr; });
    std::function<void()> task = std::move(worker->task);
    worker->task = nullptr;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    all.idle.push_back(worker);
  }
}

void run_at_once(std::function<void()> task) {
  Workers& all = workers();
  std::unique_lock<std::mutex> lock(all.lock);
  if (!all.idle.empty()) {
    Worker* worker = all.idle.back();
    all.idle.pop_back();
    worker->task = std::move(task);
    worker->wake.notify_one();
    return;
  }
  lock.unlock();
  Worker* worker = new Worker;
  worker->task = std::move(task);
  start_thread([worker] { serve(worker); });
}

}  // namespace emulated
