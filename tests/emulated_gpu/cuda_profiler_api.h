// The two functions of the runtime's profiler header, which the CUDA wheels that tests install do not hold.
// Knows nothing of a profiler: there is none on the stand-in.
#pragma once

#include <cuda_runtime_api.h>

extern "C" {
cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);
}
