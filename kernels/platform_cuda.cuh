// The CUDA target (nvcc and NVRTC, sm_80 and later): PTX lives here and nowhere else.
// Knows nothing of protocols or collectives.
#pragma once

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif
#define GAR_TABLES_BY_VALUE 1
#include "args.h"

#define GAR_DEVICE __device__ __forceinline__
#define GAR_MEMBER __device__ __forceinline__
// Inlined like all else: what is called has an address of the caller's objects, and that puts them on a stack.
#define GAR_NOINLINE GAR_DEVICE
#define GAR_OUTLINE GAR_DEVICE
#define GAR_UNROLL _Pragma("unroll")
#define GAR_MAX_THREADS 512
#define GAR_KERNEL(name, Args, body)                                                                         \
  extern "C" __global__ void __launch_bounds__(GAR_MAX_THREADS, 1) name(const __grid_constant__ Args args) { \
    body(gar::Block(), args);                                                                                \
  }
#include "lanes.cuh"

namespace gar {

constexpr int kPackBytes = 16;  // one LDG.128 of elements as stored
constexpr bool kPackHoldsStorage = true;
constexpr bool kVectorsNeedAlignment = true;
constexpr int kLoadsInFlight = 8;       // packs a thread loads before it uses the first
constexpr uint32_t kGroupThreads = 32;  // a warp: its packs of one load should be neighbours

GAR_DEVICE uint64_t load_acquire(const uint64_t* word) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
GAR_DEVICE void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"((unsigned long long)value) : "memory");
}
// At system scope: the host claims too.
GAR_DEVICE bool claim(uint64_t* word) {
  unsigned long long before;
  asm volatile("atom.acq_rel.sys.global.exch.b64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
  return before == 0;
}
GAR_DEVICE uint64_t clock_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

struct Block {
  GAR_DEVICE uint32_t index() const { return blockIdx.x; }
  GAR_DEVICE uint32_t count() const { return gridDim.x; }
  GAR_DEVICE uint32_t thread() const { return threadIdx.x; }
  GAR_DEVICE uint32_t threads() const { return blockDim.x; }
  GAR_DEVICE void sync() const { __syncthreads(); }
  GAR_DEVICE bool sync_or(bool any) const { return __syncthreads_or(any) != 0; }
};

// Between two looks at a word: true when it is time to look at the clock as well.
struct Backoff {
  uint32_t looks = 0;
  GAR_DEVICE explicit Backoff(const GarArgs&) {}
  GAR_DEVICE bool pause() { return (++looks & 255) == 0; }
  GAR_DEVICE int interrupted(const GarArgs&) { return 0; }
};

template <class E, int N>
using Lanes = ArrayLanes<E, N>;

// The union, not a cast of the struct: NVRTC keeps LDG.128/STG.128 for every element size this way.
template <class E, int N>
GAR_DEVICE Lanes<E, N> load_lanes(const void* base, uint64_t pack) {
  Lanes<E, N> r;
  if constexpr (sizeof(E) * N == kPackBytes) {
    union {
      uint4 raw;
      Lanes<E, N> lanes;
    } u;
    u.raw = static_cast<const uint4*>(base)[pack];
    return u.lanes;
  } else if constexpr (sizeof(E) * N > kPackBytes) {  // accumulators: several whole vectors
    constexpr int kVectors = sizeof(E) * N / kPackBytes;
    union {
      uint4 raw[kVectors];
      Lanes<E, N> lanes;
    } u;
    GAR_UNROLL for (int i = 0; i < kVectors; ++i)
      u.raw[i] = static_cast<const uint4*>(base)[pack * kVectors + i];
    return u.lanes;
  } else {
    GAR_UNROLL for (int i = 0; i < N; ++i)
      r.v[i] = static_cast<const E*>(base)[pack * N + i];
    return r;
  }
}
// By name: a plain store of a uint4 is four stores to the compiler, which does not always join them again.
GAR_DEVICE void store_vector(uint4* to, const uint4& value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
template <class E, int N>
GAR_DEVICE void store_lanes(void* base, uint64_t pack, const Lanes<E, N>& value) {
  if constexpr (sizeof(E) * N >= kPackBytes) {
    constexpr int kVectors = sizeof(E) * N / kPackBytes;
    union {
      uint4 raw[kVectors];
      Lanes<E, N> lanes;
    } u;
    u.lanes = value;
    GAR_UNROLL for (int i = 0; i < kVectors; ++i)
      store_vector(static_cast<uint4*>(base) + (pack * kVectors + i), u.raw[i]);
  } else {
    GAR_UNROLL for (int i = 0; i < N; ++i)
      static_cast<E*>(base)[pack * N + i] = value.v[i];
  }
}
template <class E, int N>
GAR_DEVICE void store_lanes_streaming(void* base, uint64_t pack, const Lanes<E, N>& value) {
  store_lanes<E, N>(base, pack, value);
}
GAR_DEVICE void streaming_fence() {}

// Bytes to the next address at which whole packs may be touched.
GAR_DEVICE uint32_t pack_misalignment(const void* p) { return uint32_t(-(int64_t)p) & (kPackBytes - 1); }

GAR_DEVICE float quiet_nan(float) { return __uint_as_float(0x7fc00000u); }
GAR_DEVICE double quiet_nan(double) { return __longlong_as_double(0x7ff8000000000000ll); }
template <class L>
struct Splat {
  template <class E>
  static GAR_MEMBER L of(E value) {
    L r;
    GAR_UNROLL for (auto& lane : r.v)
      lane = value;
    return r;
  }
};
template <>
struct Splat<uint32_t> {
  static GAR_MEMBER uint32_t of(uint32_t value) { return value; }
};
template <class L, class E>
GAR_DEVICE L splat(E value) {
  return Splat<L>::of(value);
}
template <class To, class From, int N>
GAR_DEVICE Lanes<To, N> convert(const Lanes<From, N>& a) {
  Lanes<To, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = To(a.v[i]);
  return r;
}

template <int N>
GAR_DEVICE Lanes<float, N> widen_float16(const Lanes<uint16_t, N>& a) {
  Lanes<float, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    asm("cvt.f32.f16 %0, %1;" : "=f"(r.v[i]) : "h"(a.v[i]));
  return r;
}
// Two 16-bit floats in one register, `a` in the lower half; NaN as NOTE canonical NaN has it.
struct TwoFloat16 {
  static GAR_MEMBER uint32_t of(float a, float b) {
    uint32_t two, is_nan;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
    asm("set.neu.u32.f16x2 %0, %1, %1;" : "=r"(is_nan) : "r"(two));
    return (two & ~is_nan) | (0x7e007e00u & is_nan);
  }
};
struct TwoBFloat16 {
  static GAR_MEMBER uint32_t of(float a, float b) {
    uint32_t two, is_nan;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
#if __CUDA_ARCH__ >= 900
    asm("set.neu.u32.bf16x2 %0, %1, %1;" : "=r"(is_nan) : "r"(two));
#else
    // Bit 15 of each half, carried there by all that is greater than infinity; prmt spreads it over the half.
    const uint32_t carried = (two & 0x7fff7fffu) + 0x007f007fu;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(is_nan) : "r"(carried));
#endif
    return (two & ~is_nan) | (0x7fc07fc0u & is_nan);
  }
};
// Function::of on two neighbours at a time: registers hold two 16-bit lanes, and taking them apart costs instructions.
template <class Function, int N>
GAR_DEVICE Lanes<uint16_t, N> narrow_in_pairs(const Lanes<float, N>& a) {
  if constexpr (N == 1) {
    return {{uint16_t(Function::of(a.v[0], a.v[0]))}};
  } else {
    union {
      uint32_t pairs[N / 2];
      Lanes<uint16_t, N> lanes;
    } u;
    GAR_UNROLL for (int i = 0; i < N / 2; ++i)
      u.pairs[i] = Function::of(a.v[2 * i], a.v[2 * i + 1]);
    return u.lanes;
  }
}
template <int N>
GAR_DEVICE Lanes<uint16_t, N> narrow_float16(const Lanes<float, N>& a) {
  return narrow_in_pairs<TwoFloat16, N>(a);
}
template <int N>
GAR_DEVICE Lanes<float, N> widen_bfloat16(const Lanes<uint16_t, N>& a) {
  Lanes<float, N> r;
  if constexpr (N == 1) {
    r.v[0] = __uint_as_float(uint32_t(a.v[0]) << 16);
  } else {
    union {
      uint32_t pairs[N / 2];
      Lanes<uint16_t, N> lanes;
    } u;
    u.lanes = a;
    GAR_UNROLL for (int i = 0; i < N / 2; ++i) {
      r.v[2 * i] = __uint_as_float(u.pairs[i] << 16);
      r.v[2 * i + 1] = __uint_as_float(u.pairs[i] & 0xffff0000u);
    }
  }
  return r;
}
template <int N>
GAR_DEVICE Lanes<uint16_t, N> narrow_bfloat16(const Lanes<float, N>& a) {
  return narrow_in_pairs<TwoBFloat16, N>(a);
}
GAR_DEVICE uint32_t float_bits(float a) { return __float_as_uint(a); }
GAR_DEVICE float bits_float(uint32_t a) { return __uint_as_float(a); }
template <int N>
GAR_DEVICE Lanes<uint32_t, N> float_bits(const Lanes<float, N>& a) {
  Lanes<uint32_t, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = float_bits(a.v[i]);
  return r;
}
template <int N>
GAR_DEVICE Lanes<float, N> bits_float(const Lanes<uint32_t, N>& a) {
  Lanes<float, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = bits_float(a.v[i]);
  return r;
}
// Function::of on 32-bit patterns, lane by lane.
template <class Function, int N>
GAR_DEVICE Lanes<uint32_t, N> apply(const Lanes<uint32_t, N>& a) {
  Lanes<uint32_t, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = Function::of(a.v[i]);
  return r;
}
template <class V>
GAR_DEVICE V select_bits(bool mask, const V& a, const V& b) {
  return mask ? a : b;
}

}  // namespace gar
