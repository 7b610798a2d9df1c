// The elements of a race test: what each rank brings to a call, and what must come out. All sums are exact.
// Knows nothing of memory layout or threads.
#pragma once

#include <string.h>

#include <type_traits>

#include "pack.cuh"
#include "shake.h"

#ifndef RACE_ELEMENT
#define RACE_ELEMENT uint32_t
#endif
#ifndef RACE_OPERATOR
#define RACE_OPERATOR Sum
#endif

namespace gar {
typedef RACE_ELEMENT RaceElement;
// Any other order of operands gives another result.
struct InOrder : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return a + a + a + b;
  }
};
typedef RACE_OPERATOR RaceOperator;
}  // namespace gar

namespace race {

typedef gar::RaceOperator Operator;
typedef gar::Element<gar::RaceElement> Element;
typedef Element::Storage Storage;
typedef Element::Accumulator Accumulator;
typedef gar::Lanes<Storage, 1> Stored;
typedef gar::Lanes<Accumulator, 1> Folded;

// 1 or 2: sums, products and their roundings are exact in every type and order for up to 8 ranks.
inline double small(uint64_t bits) { return double(1 + (bits & 1)); }
template <class E>
inline void fill(gar::Complex<E>& lane, uint64_t bits) {
  lane = {E(small(bits)), E(small(bits >> 1) - 1)};
}
inline void fill(double& lane, uint64_t bits) { lane = small(bits); }
inline void fill(float& lane, uint64_t bits) {
  lane = float(small(bits));
  const uint32_t nan = 0x7f800001u | uint32_t(bits >> 32);  // any sign and payload
  if (sizeof(Storage) == sizeof(float) && bits % 16 == 7) memcpy(&lane, &nan, sizeof lane);
}
template <class Integer>
inline void fill(Integer& lane, uint64_t bits) {
  lane = Integer(bits);
}

// What a rank brings at a place of its array in a call.
inline Storage value(uint64_t call, uint32_t rank, uint64_t index) {
  Accumulator lane;
  fill(lane, hash(call, rank, index));
  Storage storage;
  if constexpr (sizeof(Storage) == sizeof(Accumulator)) {
    memcpy(&storage, &lane, sizeof storage);
  } else {
    const Stored stored = Element::round<1>(gar::load_lanes<Accumulator, 1>(&lane, 0));
    memcpy(&storage, &stored, sizeof storage);
  }
  return storage;
}

inline Folded widened(uint64_t call, uint32_t rank, uint64_t index) {
  const Storage storage = value(call, rank, index);
  return Element::widen<1>(gar::load_lanes<Storage, 1>(&storage, 0));
}

// The fold over all ranks at a place.
inline Storage folded(uint64_t call, uint32_t nranks, uint64_t index) {
  Folded sum = widened(call, 0, index);
  for (uint32_t rank = 1; rank < nranks; ++rank) sum = Operator::combine(sum, widened(call, rank, index));
  const Stored result = Element::round<1>(Operator::finish<Accumulator>(sum, nranks));
  Storage storage;
  memcpy(&storage, &result, sizeof storage);
  return storage;
}

inline bool same_bits(const Storage& a, const Storage& b) { return memcmp(&a, &b, sizeof a) == 0; }

// Folded float NaNs are positive, quiet and without payload; see NOTE canonical NaN.
inline bool canonical(const Storage& result) {
  uint32_t bits = 0;
  if (sizeof(Storage) == sizeof bits) memcpy(&bits, &result, sizeof bits);
  return !std::is_same<gar::RaceElement, float>::value || (bits & 0x7fffffffu) <= 0x7f800000u || bits == 0x7fc00000u;
}

}  // namespace race
