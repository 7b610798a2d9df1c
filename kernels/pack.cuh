// The block's inner loops over memory: fold arrays into arrays, copy arrays; whole packs, scalar head and tail.
// Knows nothing of flags, steps or which rank an address belongs to.
#pragma once

#include "ops.cuh"

namespace gar {

template <class T>
GAR_DEVICE constexpr int lanes_in_pack() {
  typedef Element<T> X;
  return kPackBytes / int(kPackHoldsStorage ? sizeof(typename X::Storage) : sizeof(typename X::Accumulator));
}
template <class T>
GAR_DEVICE constexpr uint64_t element_bytes() {
  return sizeof(typename Element<T>::Storage);
}
template <class T>
GAR_DEVICE void* element(void* base, uint64_t index) {
  return static_cast<char*>(base) + index * element_bytes<T>();
}
template <class T>
GAR_DEVICE const void* element(const void* base, uint64_t index) {
  return static_cast<const char*>(base) + index * element_bytes<T>();
}
GAR_DEVICE uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Addresses held in registers; whatever else has operator[] serves as well.
template <class Pointer, int K>
struct Held {
  Pointer at[K];
  GAR_MEMBER Pointer operator[](int k) const { return at[k]; }
};
// `base` with every address moved on by some elements.
template <class T, class Base>
struct Shifted {
  const Base& base;
  uint64_t elements;
  GAR_MEMBER auto operator[](int k) const { return element<T>(base[k], elements); }
};
template <class T, int K, class Base>
GAR_DEVICE auto shifted(const Base& base, uint64_t elements) {
  if constexpr (K > 0) {
    Held<decltype(element<T>(base[0], 0)), K> held;
    GAR_UNROLL for (int k = 0; k < K; ++k)
      held.at[k] = element<T>(base[k], elements);
    return held;
  } else {
    return Shifted<T, Base>{base, elements};
  }
}

// The number of ranks as a constant where a kernel is made for it: to divide by a power of two is then to multiply.
template <int P>
GAR_DEVICE uint32_t ranks_of(uint32_t nranks) {
  return P > 0 ? P : nranks;
}

// How many packs a thread loads before it uses the first, if each takes so many vectors (0: not known).
GAR_DEVICE constexpr int packs_together(int vectors) {
  return vectors == 0 || vectors >= kLoadsInFlight ? 1 : kLoadsInFlight / vectors;
}
// The packs that a thread takes U at a time: from each of first, first + step, ... below end, U packs kGroupThreads
// apart. That distance is a constant, so one address serves all of them. All packs below end are some thread's.
struct Tiles {
  uint64_t first, step, end;
};
template <int U>
GAR_DEVICE Tiles tiles_of(const Block& block, uint64_t packs) {
  const uint64_t threads = block.threads(), thread = block.thread();
  if (U == 1 || threads % kGroupThreads != 0) return {0, 1, 0};
  return {thread / kGroupThreads * (U * kGroupThreads) + thread % kGroupThreads, U * threads,
          packs - packs % (U * threads)};
}

// One pack (or, with N = 1, one element): to[d] = round(finish(from[0] op from[1] op ...)) for every d.
// K and D: how many sources and targets, 0 where that is known at run time only. U packs, `stride` apart, are loaded
// before the first is used.
template <class T, class Op, int K, int D, int N, int U, bool Streaming, class From, class To>
GAR_DEVICE void fold_packs(const From& from, const To& to, uint32_t nranks, uint64_t pack, uint64_t stride) {
  typedef Element<T> X;
  typedef typename X::Storage S;
  constexpr int kHeld = K > 0 ? K : 1;
  Lanes<S, N> raw[kHeld][U];
  GAR_UNROLL for (int k = 0; k < kHeld; ++k) {
    GAR_UNROLL for (int u = 0; u < U; ++u)
      raw[k][u] = load_lanes<S, N>(from[k], pack + u * stride);
  }
  GAR_UNROLL for (int u = 0; u < U; ++u) {
    auto sum = X::template widen<N>(raw[0][u]);
    if constexpr (K > 0) {
      GAR_UNROLL for (int k = 1; k < K; ++k)
        sum = Op::combine(sum, X::template widen<N>(raw[k][u]));
    } else {
      for (int k = 1; k < int(nranks); ++k)
        sum = Op::combine(sum, X::template widen<N>(load_lanes<S, N>(from[k], pack + u * stride)));
    }
    sum = Op::template finish<typename X::Accumulator>(sum, nranks);
    const Lanes<S, N> result = X::template round<N>(sum);
    const int targets = D > 0 ? D : int(nranks);
    GAR_UNROLL for (int d = 0; d < targets; ++d) {
      if constexpr (Streaming) {
        store_lanes_streaming<S, N>(to[d], pack + u * stride, result);
      } else {
        store_lanes<S, N>(to[d], pack + u * stride, result);
      }
    }
  }
}

// Elements before the first whole pack of every address, or n where no such place exists.
template <class T, class From, class To>
GAR_DEVICE uint64_t head_elements(const From& from, int nfrom, const To& to, int nto, uint64_t n) {
  const uint32_t bytes = pack_misalignment(to[0]);
  bool alike = bytes % element_bytes<T>() == 0;
  for (int k = 0; k < nfrom; ++k) alike = alike && pack_misalignment(from[k]) == bytes;
  for (int d = 1; d < nto; ++d) alike = alike && pack_misalignment(to[d]) == bytes;
  return alike ? smaller(bytes / element_bytes<T>(), n) : n;
}

// Elements [0, head) and [tail, n) one at a time; out of line, since every call has at most a few.
template <class T, class Op, int K, int D, class From, class To>
GAR_NOINLINE void fold_elements(const Block& block, const From& from, const To& to, uint32_t nranks, uint64_t head,
                                uint64_t tail, uint64_t n) {
  const uint64_t between = tail - head;
  for (uint64_t i = block.thread(); i < n - between; i += block.threads())
    fold_packs<T, Op, K, D, 1, 1, false>(from, to, nranks, i < head ? i : i + between, 0);
}

template <class T, class Op, int K, int D, bool Streaming, class From, class To>
GAR_OUTLINE void fold_range(const Block& block, const From& from, const To& to, uint32_t nranks, uint64_t n,
                            uint64_t head) {
  constexpr int N = lanes_in_pack<T>();
  // Where a pack becomes four or more vectors of accumulators, half as many keep them in registers.
  constexpr bool kWide = sizeof(typename Element<T>::Accumulator) > 2 * element_bytes<T>();
  constexpr int U = packs_together(kWide ? 2 * K : K);
  const uint64_t stride = block.threads(), packs = (n - head) / N, tail = head + packs * N;
  if (head > 0 || tail < n) fold_elements<T, Op, K, D>(block, from, to, nranks, head, tail, n);
  const auto body_from = shifted<T, K>(from, head);
  const auto body_to = shifted<T, D>(to, head);
  const Tiles tiles = tiles_of<U>(block, packs);
  for (uint64_t i = tiles.first; i < tiles.end; i += tiles.step)
    fold_packs<T, Op, K, D, N, U, Streaming>(body_from, body_to, nranks, i, kGroupThreads);
  for (uint64_t i = tiles.end + block.thread(); i < packs; i += stride)
    fold_packs<T, Op, K, D, N, 1, Streaming>(body_from, body_to, nranks, i, 0);
  if (Streaming) streaming_fence();
}

constexpr uint64_t kWorthAligning = 4096;  // bytes; below, the single elements before the first line cost more

// Folds n elements of nranks arrays, in the order of `from`, into each array of `to` (D of them, or nranks).
template <class T, class Op, int K, int D, class From, class To>
GAR_DEVICE void fold(const Block& block, const From& from, const To& to, uint32_t nranks, uint64_t n, bool streaming) {
  if constexpr (!kVectorsNeedAlignment) {
    // Any address will do, but stores that straddle cache lines are slow, and streaming ones are not allowed to.
    const bool aligning = n * element_bytes<T>() >= kWorthAligning;
    const uint64_t head = aligning ? head_elements<T>(from, 0, to, streaming ? (D > 0 ? D : int(nranks)) : 1, n) : 0;
    if (streaming && aligning && head < n) return fold_range<T, Op, K, D, true>(block, from, to, nranks, n, head);
    return fold_range<T, Op, K, D, false>(block, from, to, nranks, n, head < n ? head : 0);
  } else {
    const uint64_t head = head_elements<T>(from, K > 0 ? K : int(nranks), to, D > 0 ? D : int(nranks), n);
    fold_range<T, Op, K, D, false>(block, from, to, nranks, n, head);
  }
}

// The unsigned word that moves an element without looking at it: bits, NaN payloads included, stay as they are.
template <uint64_t Bytes>
struct Word {
  typedef uint64_t type;
};
template <>
struct Word<1> {
  typedef uint8_t type;
};
template <>
struct Word<2> {
  typedef uint16_t type;
};
template <>
struct Word<4> {
  typedef uint32_t type;
};

// Copies n elements to each of D targets.
template <class T, int D, class To>
GAR_OUTLINE void copy_to(const Block& block, const To& to, const void* from, uint64_t n, bool streaming) {
  typedef typename Word<element_bytes<T>()>::type W;
  const Held<const void*, 1> one{{from}};
  fold<W, Sum, 1, D>(block, one, to, 1, n * (element_bytes<T>() / sizeof(W)), streaming);
}
template <class T>
GAR_DEVICE void copy(const Block& block, void* to, const void* from, uint64_t n, bool streaming = false) {
  const Held<void*, 1> one{{to}};
  copy_to<T, 1>(block, one, from, n, streaming);
}

}  // namespace gar
