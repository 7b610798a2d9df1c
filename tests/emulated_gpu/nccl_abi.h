// The part of NCCL's public interface that the stand-in serves: its numbers and structs.
// Knows nothing of how it is served. Written from NCCL's documentation; the numbers are fixed for all NCCL 2.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#define NCCL_API extern "C" __attribute__((visibility("default")))

namespace emulated_nccl {

constexpr int kVersion = 23003;  // 2.30.3, the first that lets ranks share a GPU
constexpr int kUniqueIdBytes = 128;
constexpr unsigned kConfigMagic = 0xcafebeef;
constexpr int kNoColor = -1;

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kDataTypes,
};

enum ReductionOp : int { kSum, kProd, kMax, kMin, kAvg, kBuiltInOps };

enum ScalarResidence : int { kScalarDevice, kScalarHostImmediate };

struct UniqueId {
  char internal[kUniqueIdBytes];
};

// The head of ncclConfig_t, which every version of it begins with.
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;  // INT_MIN: not set
};

}  // namespace emulated_nccl
