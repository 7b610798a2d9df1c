// Catches memory faults of emulated device code; every other fault goes to the handler that was there before.
// Knows nothing of kernels.
#include "driver_faults.h"

#include <signal.h>

#include <mutex>

namespace emulated {

__thread sigjmp_buf* fault_target __attribute__((tls_model("initial-exec"))) = nullptr;

static struct sigaction previous[2];

static void handle(int signal, siginfo_t* info, void* machine) {
  if (fault_target != nullptr) siglongjmp(*fault_target, 1);
  static volatile sig_atomic_t passed_on = 0;
  const struct sigaction& before = previous[signal == SIGBUS];
  // A handler that was set after ours may come back here; once is enough.
  if (passed_on++) {
    ::signal(signal, SIG_DFL);
    return;
  }
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal, info, machine);
  } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    // Returning repeats the access, which then ends the process as it would have.
    ::signal(signal, SIG_DFL);
  } else {
    before.sa_handler(signal);
  }
}

void watch_faults() {
  static std::mutex& lock = *new std::mutex;
  std::lock_guard<std::mutex> guard(lock);
  for (const int signal : {SIGSEGV, SIGBUS}) {
    struct sigaction now;
    sigaction(signal, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle) continue;
    previous[signal == SIGBUS] = now;
    struct sigaction ours = {};
    ours.sa_sigaction = handle;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(signal, &ours, nullptr);
  }
}

}  // namespace emulated
