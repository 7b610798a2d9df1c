// The host target (g++ and clang++): a block is one thread, or one OS thread per CUDA thread in the race tests.
// Knows nothing of protocols or collectives.
#pragma once

#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "args.h"

#define GAR_DEVICE static inline __attribute__((always_inline, unused))
#define GAR_MEMBER inline __attribute__((always_inline))
#define GAR_NOINLINE __attribute__((noinline))
#define GAR_OUTLINE \
  static GAR_NOINLINE  // a loop over memory: a call costs nothing beside it, and compiling it once saves time
#define GAR_UNROLL
#ifndef GAR_BLOCK_THREADS
#define GAR_BLOCK_THREADS 1
#endif
#define GAR_KERNEL(name, Args, body)                                                                      \
  extern "C" __attribute__((visibility("default"))) int name(const Args* args, const gar::Block* block) { \
    const gar::DefaultRounding rounding;                                                                  \
    return body(*block, *args);                                                                           \
  }
#include "lanes.cuh"

// ThreadSanitizer must see every access, so under it no store is hidden in an assembler statement.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define GAR_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define GAR_SANITIZED 1
#endif
#endif

namespace gar {

// The widest registers of this machine, as -march tells them.
#if defined(__AVX512F__)
constexpr int kPackBytes = 64;
#elif defined(__AVX__)
constexpr int kPackBytes = 32;
#else
constexpr int kPackBytes = 16;
#endif
constexpr bool kPackHoldsStorage = false;  // a pack fills a register once widened
constexpr bool kVectorsNeedAlignment = false;
constexpr int kLoadsInFlight = 1;  // out-of-order cores find the parallel loads by themselves
constexpr uint32_t kGroupThreads = 1;

GAR_DEVICE uint64_t load_acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
GAR_DEVICE void store_release(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
GAR_DEVICE bool claim(uint64_t* word) { return __atomic_exchange_n(word, 1, __ATOMIC_ACQ_REL) == 0; }
GAR_DEVICE uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

// A caller's thread may flush subnormals or round otherwise (fast-math libraries set that); kernels never do.
class DefaultRounding {
#if defined(__aarch64__)
 public:
  DefaultRounding() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)));
  }
  ~DefaultRounding() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(saved_));
  }

 private:
  uint64_t saved_;
#elif defined(__x86_64__)
 public:
  DefaultRounding() {
    const unsigned standard = 0x1f80;
    asm volatile("stmxcsr %0" : "=m"(saved_));
    if (saved_ != standard) asm volatile("ldmxcsr %0" ::"m"(standard));
  }
  ~DefaultRounding() {
    if (saved_ != 0x1f80) asm volatile("ldmxcsr %0" ::"m"(saved_));
  }

 private:
  unsigned saved_;
#endif
};

// What the threads of one block share where a block has several (GAR_BLOCK_THREADS > 1).
struct BlockBarrier {
  void (*wait)(BlockBarrier*);
  bool any;  // sticky: a block gives up once
};

struct Block {
  uint32_t block_index, block_count, thread_index;
  BlockBarrier* barrier;

  GAR_MEMBER uint32_t index() const { return block_index; }
  GAR_MEMBER uint32_t count() const { return block_count; }
  // Constants for one thread, so that a block-stride loop compiles to a plain loop.
  GAR_MEMBER uint32_t thread() const { return GAR_BLOCK_THREADS == 1 ? 0 : thread_index; }
  GAR_MEMBER constexpr uint32_t threads() const { return GAR_BLOCK_THREADS; }
  GAR_MEMBER void sync() const {
    if (GAR_BLOCK_THREADS > 1) barrier->wait(barrier);
  }
  GAR_MEMBER bool sync_or(bool any) const {
    if (GAR_BLOCK_THREADS == 1) return any;
    if (any) __atomic_store_n(&barrier->any, true, __ATOMIC_RELAXED);
    barrier->wait(barrier);
    const bool result = __atomic_load_n(&barrier->any, __ATOMIC_RELAXED);
    barrier->wait(barrier);  // nobody sets `any` for the next meeting before all have read this one
    return result;
  }
};

// Pause, then yield, then sleep: a peer that is computing for long must not cost a core.
struct Backoff {
  static constexpr uint64_t kSleepAfterNs = 2000000;  // of waiting; a sleep then costs a few percent
  static constexpr long kSleepNs = 50000;
  static constexpr uint64_t kPollEveryNs = 20000000;
  uint32_t spins_left;
  uint64_t first_ns = 0, polled_ns = 0;

  GAR_MEMBER explicit Backoff(const GarArgs& args) : spins_left(args.spin) {}

  // Between two looks at a word: true when it is time to look at the clock as well.
  GAR_MEMBER bool pause() {
    if (spins_left > 0) {
      --spins_left;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
      return false;
    }
    return give_way();
  }
  __attribute__((noinline)) bool give_way() {
    const uint64_t now = clock_ns();
    if (first_ns == 0) first_ns = polled_ns = now;
    if (now - first_ns < kSleepAfterNs) {
      sched_yield();
    } else {
      const timespec nap = {0, kSleepNs};
      nanosleep(&nap, nullptr);
    }
    return true;
  }
  // Asks the caller's poll now and then; see GarPoll.
  int interrupted(const GarArgs& args) {
    if (args.poll == nullptr || clock_ns() - polled_ns < kPollEveryNs) return 0;
    polled_ns = clock_ns();
    return args.poll(args.poll_context);
  }
};

template <class E, int N>
struct LanesOf {
  typedef E type __attribute__((vector_size(sizeof(E) * N)));
  typedef E value_type __attribute__((vector_size(sizeof(E) * N), aligned(1), may_alias));
  struct Unaligned {
    value_type value;
  };
};
template <class E>
struct Complex;  // dtypes.cuh
template <class E, int N>
struct LanesOf<Complex<E>, N> {
  typedef ArrayLanes<Complex<E>, N> type;
  struct Unaligned {
    type value;
  } __attribute__((packed, may_alias));
};
template <class E, int N>
using Lanes = typename LanesOf<E, N>::type;

template <class E, int N>
GAR_DEVICE Lanes<E, N> load_lanes(const void* base, uint64_t pack) {
  return static_cast<const typename LanesOf<E, N>::Unaligned*>(base)[pack].value;
}
template <class E, int N>
GAR_DEVICE void store_lanes(void* base, uint64_t pack, const Lanes<E, N>& value) {
  static_cast<typename LanesOf<E, N>::Unaligned*>(base)[pack].value = value;
}

// Stores past the caches, to whole aligned packs; smaller values and other machines store plainly.
template <class E, int N>
GAR_DEVICE void store_lanes_streaming(void* base, uint64_t pack, const Lanes<E, N>& value) {
#if defined(__AVX__) && !defined(GAR_SANITIZED)
  typedef float Register __attribute__((vector_size(kPackBytes)));
  if constexpr (sizeof(value) == kPackBytes) {
    Register bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    asm volatile("vmovntps %1, %0" : "=m"(static_cast<Register*>(base)[pack]) : "v"(bits) : "memory");
    return;
  }
#endif
  store_lanes<E, N>(base, pack, value);
}
// Streaming stores are weakly ordered: this must stand between them and any release.
GAR_DEVICE void streaming_fence() {
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#endif
}
GAR_DEVICE uint32_t pack_misalignment(const void* p) { return uint32_t(-intptr_t(p)) & (kPackBytes - 1); }

GAR_DEVICE float quiet_nan(float) { return __builtin_nanf(""); }
GAR_DEVICE double quiet_nan(double) { return __builtin_nan(""); }
template <class L, class E>
GAR_DEVICE L splat(E value) {
  return L{} + value;
}
template <class To, class From>
GAR_DEVICE auto convert(const From& a) {
  constexpr int kLanes = sizeof(From) / sizeof(a[0]);
  return __builtin_convertvector(a, Lanes<To, kLanes>);
}
template <class M, class V>
GAR_DEVICE V select(const M& mask, const V& a, const V& b) {
  return mask ? a : b;
}

// Function::of on 32-bit patterns: its branch-free arithmetic takes a whole vector at once.
template <class Function, int N>
GAR_DEVICE Lanes<uint32_t, N> apply(const Lanes<uint32_t, N>& a) {
  return Function::of(a);
}
template <class M, class V>
GAR_DEVICE V select_bits(const M& mask, const V& a, const V& b) {
  return mask ? a : b;
}

template <class V>
GAR_DEVICE auto float_bits(const V& a) {
  return (Lanes<uint32_t, sizeof(V) / 4>)a;
}
template <class V>
GAR_DEVICE auto bits_float(const V& a) {
  return (Lanes<float, sizeof(V) / 4>)a;
}

// 16 <-> 32 bit lanes. g++ 12 makes poor code of these through __builtin_convertvector on AVX-512 and AVX2,
// hence the instructions by name where a whole register is converted.
template <int N>
GAR_DEVICE Lanes<uint32_t, N> zero_extend16(const Lanes<uint16_t, N>& a) {
#if defined(__AVX2__)
  if constexpr (N * 4 == kPackBytes && kPackBytes >= 32) {
    Lanes<uint32_t, N> r;
    asm("vpmovzxwd %1, %0" : "=v"(r) : "v"(a));
    return r;
  }
#endif
  return __builtin_convertvector(a, Lanes<uint32_t, N>);
}
template <int N>
GAR_DEVICE Lanes<uint16_t, N> truncate16(const Lanes<uint32_t, N>& a) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    Lanes<uint16_t, N> r;
    asm("vpmovdw %1, %0" : "=v"(r) : "v"(a));
    return r;
  }
#elif defined(__AVX2__)
  if constexpr (N == 8) {  // low halves to the low half of each 128-bit part, then the parts together
    const Lanes<uint8_t, 32> low = {0, 1, 4, 5, 8, 9, 12, 13, 128, 128, 128, 128, 128, 128, 128, 128,
                                    0, 1, 4, 5, 8, 9, 12, 13, 128, 128, 128, 128, 128, 128, 128, 128};
    Lanes<uint64_t, 4> parts;
    asm("vpshufb %2, %1, %0" : "=x"(parts) : "x"(a), "x"(low));
    const Lanes<uint64_t, 2> r = {parts[0], parts[2]};
    return (Lanes<uint16_t, N>)r;
  }
#endif
  return __builtin_convertvector(a, Lanes<uint16_t, N>);
}

// Branch-free arithmetic on bit patterns: every instruction set vectorises it. The F16C instructions
// replace it where a whole register is converted; both give the same bits.
template <int N>
GAR_DEVICE Lanes<float, N> widen_float16(const Lanes<uint16_t, N>& a) {
#if defined(__F16C__) && defined(__AVX2__)
  if constexpr (N * 4 == kPackBytes) {
    Lanes<float, N> r;
    asm("vcvtph2ps %1, %0" : "=v"(r) : "v"(a));
    return r;
  }
#endif
  const Lanes<uint32_t, N> h = zero_extend16<N>(a);
  const Lanes<uint32_t, N> magnitude = (h & 0x7fffu) << 13;
  const Lanes<float, N> scaled = bits_float(magnitude) * 0x1p112f;  // rebias; normalises subnormals exactly
  const Lanes<uint32_t, N> finite = float_bits(scaled);
  const Lanes<uint32_t, N> bits = (h & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : finite;
  return bits_float(bits | ((h & 0x8000u) << 16));
}
template <int N>
GAR_DEVICE Lanes<uint16_t, N> narrow_float16(const Lanes<float, N>& a) {
  const Lanes<uint32_t, N> raw = float_bits(a);
  const Lanes<uint32_t, N> canonical = splat<Lanes<uint32_t, N>>(0x7fc00000u);
  const Lanes<uint32_t, N> bits = (raw & 0x7fffffffu) > 0x7f800000u ? canonical : raw;
#if defined(__F16C__) && defined(__AVX2__)
  if constexpr (N * 4 == kPackBytes) {
    Lanes<uint16_t, N> r;
    asm("vcvtps2ph $0, %1, %0" : "=v"(r) : "v"(bits));  // 0: round to nearest even, whatever MXCSR says
    return r;
  }
#endif
  const Lanes<uint32_t, N> magnitude = bits & 0x7fffffffu;
  const Lanes<uint32_t, N> subnormal =
      float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;  // 0.5's last place is half's subnormal step
  const Lanes<uint32_t, N> normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  Lanes<uint32_t, N> r = magnitude < 0x38800000u ? subnormal : normal;
  const Lanes<uint32_t, N> infinity = splat<Lanes<uint32_t, N>>(0x7c00u), nan = splat<Lanes<uint32_t, N>>(0x7e00u);
  r = magnitude >= 0x47800000u ? infinity : r;
  r = magnitude > 0x7f800000u ? nan : r;
  return truncate16<N>(r | ((bits >> 16) & 0x8000u));
}
template <int N>
GAR_DEVICE Lanes<float, N> widen_bfloat16(const Lanes<uint16_t, N>& a) {
  return bits_float(zero_extend16<N>(a) << 16);
}
// Integer rounding, not AVX512-BF16: that instruction flushes subnormals.
template <int N>
GAR_DEVICE Lanes<uint16_t, N> narrow_bfloat16(const Lanes<float, N>& a) {
  const Lanes<uint32_t, N> bits = float_bits(a);
  const Lanes<uint32_t, N> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Lanes<uint32_t, N> nan = splat<Lanes<uint32_t, N>>(0x7fc0u);
  return truncate16<N>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

}  // namespace gar
