// Runs code that may touch addresses that are not there, and says so instead of ending the process.
// Knows nothing of kernels.
#pragma once

#include <csetjmp>

namespace emulated {

extern __thread sigjmp_buf* fault_target __attribute__((tls_model("initial-exec")));

// Makes sure that faults come here first; others go on to whoever was there before.
void watch_faults();

// True if the code ran to its end, false if it touched an address that is not mapped.
template <class Code>
bool survives(Code&& code) {
  sigjmp_buf target;
  sigjmp_buf* const outer = fault_target;
  // SA_NODEFER keeps the mask as it is, so it needs not be saved.
  if (sigsetjmp(target, 0) != 0) {
    fault_target = outer;
    return false;
  }
  fault_target = &target;
  code();
  fault_target = outer;
  return true;
}

}  // namespace emulated
