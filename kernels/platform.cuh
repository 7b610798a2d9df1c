// The machine below the kernels, as one set of names for both targets; nothing else asks what it is compiled for.
// Knows nothing of protocols or collectives.
//
// Each target defines, in namespace gar:
//   load_acquire, store_release   64-bit flag words at system scope
//   claim                         true for the first caller on a word only
//   clock_ns                      a monotonic clock, nanoseconds
//   Block                         index() of count() blocks; thread() of threads(); sync(), sync_or()
//   Backoff                       what a wait does between two looks at a word
//   Lanes<E, N>                   N elements with elementwise + * & | ^ / >= <= != and select()
//   load_lanes, store_lanes       whole packs; kVectorsNeedAlignment and pack_misalignment() tell where
//   splat, convert, float_bits, bits_float, apply, select_bits, quiet_nan, and widen_ and narrow_ of 16-bit floats
// and the macros GAR_DEVICE (function), GAR_UNROLL (loop) and GAR_KERNEL (entry point).
#pragma once

#if defined(__CUDACC__)
#include "platform_cuda.cuh"
#elif defined(GAR_EMULATED)
#include "platform_emulated.cuh"
#else
#include "platform_host.cuh"
#endif
