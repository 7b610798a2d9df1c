// The conversions of 16- and 8-bit floats as functions on arrays: whole packs, or one element at a time.
// Knows nothing of what is right.
#include "pack.cuh"

namespace {

template <class T, int N>
void widen(const void* from, void* to, uint64_t packs) {
  typedef gar::Element<T> X;
  for (uint64_t i = 0; i < packs; ++i)
    gar::store_lanes<float, N>(to, i, X::template widen<N>(gar::load_lanes<typename X::Storage, N>(from, i)));
}
template <class T, int N>
void round_all(const void* from, void* to, uint64_t packs) {
  typedef gar::Element<T> X;
  for (uint64_t i = 0; i < packs; ++i)
    gar::store_lanes<typename X::Storage, N>(to, i, X::template round<N>(gar::load_lanes<float, N>(from, i)));
}

}  // namespace

// Counts are multiples of the lanes of a pack.
#define RACE_CONVERSIONS(T)                                                                                           \
  extern "C" void widen_packs_##T(const void* from, void* to, uint64_t count) {                                       \
    widen<gar::T, gar::lanes_in_pack<gar::T>()>(from, to, count / gar::lanes_in_pack<gar::T>());                      \
  }                                                                                                                   \
  extern "C" void widen_single_##T(const void* from, void* to, uint64_t count) { widen<gar::T, 1>(from, to, count); } \
  extern "C" void round_packs_##T(const void* from, void* to, uint64_t count) {                                       \
    round_all<gar::T, gar::lanes_in_pack<gar::T>()>(from, to, count / gar::lanes_in_pack<gar::T>());                  \
  }                                                                                                                   \
  extern "C" void round_single_##T(const void* from, void* to, uint64_t count) {                                      \
    round_all<gar::T, 1>(from, to, count);                                                                            \
  }
RACE_CONVERSIONS(Float16)
RACE_CONVERSIONS(BFloat16)
RACE_CONVERSIONS(Float8E4M3FN)
RACE_CONVERSIONS(Float8E5M2)
