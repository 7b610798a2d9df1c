// Element types and the fold over ranks, hop by hop, as a ring does it.
// Knows nothing of how the ranks' elements get here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "nccl_abi.h"

namespace emulated_nccl {

inline size_t bytes_of(DataType type) {
  constexpr size_t kBytes[kDataTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[type];
}

// A float of 8 or 16 bits: its bits, and float32 to calculate in. Overflow saturates where kSaturates, as NVIDIA's
// float8 types do by default; kNoInfinity is float8 e4m3, whose only special value is NaN.
template <class Bits, int kExponent, int kMantissa, bool kSaturates, bool kNoInfinity>
struct SmallFloat {
  using Storage = Bits;
  using Value = float;
  static constexpr bool kIsFloat = true;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kInfinity = ((1u << kExponent) - 1) << kMantissa;  // its place, in e4m3 a number
  static constexpr uint32_t kNan =
      kNoInfinity ? kInfinity | ((1u << kMantissa) - 1) : kInfinity | (1u << (kMantissa - 1));
  static constexpr uint32_t kLargest = kNoInfinity ? kNan - 1 : kInfinity - 1;
  static constexpr uint32_t kSign = 1u << (kExponent + kMantissa);

  static float decode(uint32_t bits) {
    const uint32_t magnitude = bits & (kSign - 1), exponent = magnitude >> kMantissa;
    const uint32_t mantissa = magnitude & ((1u << kMantissa) - 1);
    float value;
    if (kNoInfinity ? magnitude == kNan : magnitude > kInfinity)
      value = std::numeric_limits<float>::quiet_NaN();
    else if (!kNoInfinity && magnitude == kInfinity)
      value = std::numeric_limits<float>::infinity();
    else if (exponent == 0)
      value = std::ldexp(float(mantissa), 1 - kBias - kMantissa);
    else
      value = std::ldexp(float(mantissa | (1u << kMantissa)), int(exponent) - kBias - kMantissa);
    return bits & kSign ? -value : value;
  }

  static float load(Bits bits) {
    static const std::vector<float> table = [] {
      std::vector<float> values(size_t(kSign) * 2);
      for (uint32_t i = 0; i < values.size(); ++i) values[i] = decode(i);
      return values;
    }();
    return table[bits];
  }

  // To nearest, ties to even.
  static Bits store(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 31 ? kSign : 0, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return Bits(sign | kNan);
    int exponent = int(magnitude >> 23) - 127;
    uint32_t mantissa = magnitude & 0x7fffffu;
    if (exponent == -127)
      exponent = -126;
    else
      mantissa |= 0x800000u;
    // A result below the smallest normal number keeps fewer mantissa bits; its exponent field is zero.
    const int below = std::max(0, 1 - kBias - exponent), shift = 23 - kMantissa + below;
    if (shift > 25) return Bits(sign);
    uint64_t rounded = mantissa >> shift;
    const uint64_t rest = mantissa & ((uint64_t(1) << shift) - 1), half = uint64_t(1) << (shift - 1);
    if (rest > half || (rest == half && (rounded & 1))) ++rounded;
    // The mantissa's leading bit, added in, counts one exponent: the field is the exponent's less one.
    if (below == 0) rounded += uint64_t(exponent + kBias - 1) << kMantissa;
    if (rounded > kLargest) rounded = kSaturates ? kLargest : (kNoInfinity ? kNan : kInfinity);
    return Bits(sign | rounded);
  }

  static float round(float value) { return load(store(value)); }
};

template <class T>
struct Native {
  using Storage = T;
  using Value = T;
  static constexpr bool kIsFloat = std::is_floating_point<T>::value;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
  static T round(T value) { return value; }
};

using Float16 = SmallFloat<uint16_t, 5, 10, false, false>;
using Bfloat16 = SmallFloat<uint16_t, 8, 7, false, false>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, true, true>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, true, false>;

// An operator as a call names it: a built-in one, or one made by ncclRedOpCreatePreMulSum with its scalar's bits.
struct Op {
  ReductionOp base = kSum;
  bool scaled = false;
  uint64_t scalar = 0;
};

// Integers wrap: they are combined as unsigned numbers.
template <class Value>
Value combine(ReductionOp op, Value a, Value b) {
  if constexpr (std::is_floating_point<Value>::value) {
    switch (op) {
      case kProd:
        return a * b;
      case kMax:
        return std::fmax(a, b);
      case kMin:
        return std::fmin(a, b);
      default:
        return a + b;
    }
  } else {
    using Unsigned = std::make_unsigned_t<Value>;
    switch (op) {
      case kProd:
        return Value(uint64_t(Unsigned(a)) * uint64_t(Unsigned(b)));
      case kMax:
        return std::max(a, b);
      case kMin:
        return std::min(a, b);
      default:
        return Value(Unsigned(a) + Unsigned(b));
    }
  }
}

template <class Type>
void fold_as(const std::vector<const void*>& inputs, void* output, size_t count, const Op& op) {
  using Storage = typename Type::Storage;
  using Value = typename Type::Value;
  const size_t nranks = inputs.size();
  const bool average = op.base == kAvg;
  bool scaled = op.scaled;
  Value scalar = Value();
  if (scaled) {
    Storage bits;
    std::memcpy(&bits, &op.scalar, sizeof bits);
    scalar = Type::load(bits);
  } else if (average && Type::kIsFloat) {
    scaled = true;
    scalar = Type::round(Value(1) / Value(nranks));
  }
  const auto element = [&](size_t rank, size_t i) {
    const Value value = Type::load(static_cast<const Storage*>(inputs[rank])[i]);
    return scaled ? Type::round(combine<Value>(kProd, value, scalar)) : value;
  };
  Storage* out = static_cast<Storage*>(output);
  for (size_t i = 0; i < count; ++i) {
    Value folded = element(0, i);
    for (size_t rank = 1; rank < nranks; ++rank)
      folded = Type::round(combine<Value>(op.base, folded, element(rank, i)));
    if constexpr (!Type::kIsFloat) {
      if (average) folded = Value(folded / Value(nranks));
    }
    out[i] = Type::store(folded);
  }
}

// Folds one array per rank from the first to the last, rounding to the element type after every step.
inline void fold(const std::vector<const void*>& inputs, void* output, size_t count, DataType type, const Op& op) {
  switch (type) {
    case kInt8:
      return fold_as<Native<int8_t>>(inputs, output, count, op);
    case kUint8:
      return fold_as<Native<uint8_t>>(inputs, output, count, op);
    case kInt32:
      return fold_as<Native<int32_t>>(inputs, output, count, op);
    case kUint32:
      return fold_as<Native<uint32_t>>(inputs, output, count, op);
    case kInt64:
      return fold_as<Native<int64_t>>(inputs, output, count, op);
    case kUint64:
      return fold_as<Native<uint64_t>>(inputs, output, count, op);
    case kFloat16:
      return fold_as<Float16>(inputs, output, count, op);
    case kFloat32:
      return fold_as<Native<float>>(inputs, output, count, op);
    case kFloat64:
      return fold_as<Native<double>>(inputs, output, count, op);
    case kBfloat16:
      return fold_as<Bfloat16>(inputs, output, count, op);
    case kFloat8E4M3:
      return fold_as<Float8E4M3>(inputs, output, count, op);
    case kFloat8E5M2:
      return fold_as<Float8E5M2>(inputs, output, count, op);
    default:
      return;
  }
}

}  // namespace emulated_nccl
