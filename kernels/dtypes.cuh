// Element types: how each is stored, what it accumulates in, and the one rounding at the end.
// Knows nothing of operators, memory or ranks. To add one: an Element here and a row in gpuallreduce/types.py.
#pragma once

#include "platform.cuh"

namespace gar {

// Tags of the types that C++ does not have; only their storage ever exists.
struct Float16 {};
struct BFloat16 {};
struct Float8E4M3FN {};
struct Float8E5M2 {};

template <class E>
struct Complex {
  E real, imag;
};
template <class E>
GAR_DEVICE Complex<E> operator*(const Complex<E>& a, const Complex<E>& b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

// NOTE canonical NaN: which payload and sign a NaN result has depends on the order of an instruction's operands, on
// vector against scalar code, and on the machine. Every result passes through round() once, which gives every NaN
// the positive quiet NaN of its type; so even NaN results have the same bits everywhere.

// Types that accumulate in themselves and know no NaN.
template <class T>
struct PlainElement {
  typedef T Storage;
  typedef T Accumulator;
  template <int N>
  static GAR_MEMBER Lanes<T, N> widen(const Lanes<T, N>& a) {
    return a;
  }
  template <int N>
  static GAR_MEMBER Lanes<T, N> round(const Lanes<T, N>& a) {
    return a;
  }
};

template <class T>
struct Element : PlainElement<T> {};

template <class T>
struct FloatElement : PlainElement<T> {
  template <int N>
  static GAR_MEMBER Lanes<T, N> round(const Lanes<T, N>& a) {
    return select(a != a, splat<Lanes<T, N>>(quiet_nan(T())), a);
  }
};
template <>
struct Element<float> : FloatElement<float> {};
template <>
struct Element<double> : FloatElement<double> {};

template <class E>
struct Element<Complex<E>> {
  typedef Complex<E> Storage;
  typedef Complex<E> Accumulator;
  template <int N>
  static GAR_MEMBER Lanes<Storage, N> widen(const Lanes<Storage, N>& a) {
    return a;
  }
  template <int N>
  static GAR_MEMBER Lanes<Storage, N> round(const Lanes<Storage, N>& a) {
    Lanes<Storage, N> r;
    GAR_UNROLL for (int i = 0; i < N; ++i) {
      r.v[i].real = a.v[i].real != a.v[i].real ? quiet_nan(E()) : a.v[i].real;
      r.v[i].imag = a.v[i].imag != a.v[i].imag ? quiet_nan(E()) : a.v[i].imag;
    }
    return r;
  }
};

template <>
struct Element<Float16> {
  typedef uint16_t Storage;
  typedef float Accumulator;
  template <int N>
  static GAR_MEMBER Lanes<float, N> widen(const Lanes<uint16_t, N>& a) {
    return widen_float16<N>(a);
  }
  template <int N>
  static GAR_MEMBER Lanes<uint16_t, N> round(const Lanes<float, N>& a) {
    return narrow_float16<N>(a);
  }
};
template <>
struct Element<BFloat16> {
  typedef uint16_t Storage;
  typedef float Accumulator;
  template <int N>
  static GAR_MEMBER Lanes<float, N> widen(const Lanes<uint16_t, N>& a) {
    return widen_bfloat16<N>(a);
  }
  template <int N>
  static GAR_MEMBER Lanes<uint16_t, N> round(const Lanes<float, N>& a) {
    return narrow_bfloat16<N>(a);
  }
};

GAR_DEVICE constexpr float power_of_two(int exponent) {
  float value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}

// The 8-bit encodings, by one arithmetic on bit patterns: mantissa bits, exponent bias, the pattern of the largest
// finite value, and what larger values and NaN become (e4m3fn has no infinity). ml_dtypes rounds the same way.
template <int Mantissa, int Bias, uint32_t Largest, uint32_t Overflow, uint32_t Nan>
struct Float8 {
  static constexpr int kShift = 23 - Mantissa;
  struct Widen {
    template <class U>
    static GAR_MEMBER U of(const U& h) {
      const U magnitude = (h & 0x7fu) << kShift;
      // 2^(127 - Bias) rebiases the exponent and normalises subnormals exactly.
      const U finite = float_bits(bits_float(magnitude) * power_of_two(127 - Bias));
      const U special = (magnitude & ((1u << 23) - 1u)) | 0x7f800000u;
      return select_bits((h & 0x7fu) > Largest, special, finite) | ((h & 0x80u) << 24);
    }
  };
  struct Narrow {
    template <class U>
    static GAR_MEMBER U of(const U& bits) {
      const U magnitude = bits & 0x7fffffffu;
      // Adding a power of two whose last place is the subnormal step rounds to that step, to nearest even.
      constexpr int kMagic = 1 - Bias - Mantissa + 23;
      const U subnormal = float_bits(bits_float(magnitude) + power_of_two(kMagic)) - (uint32_t(127 + kMagic) << 23);
      const U rounded =
          (magnitude + ((magnitude >> kShift) & 1u) + ((1u << (kShift - 1)) - 1u) - (uint32_t(127 - Bias) << 23)) >>
          kShift;
      U r = select_bits(magnitude < (uint32_t(128 - Bias) << 23), subnormal, rounded);
      r = select_bits((magnitude >= (uint32_t(128 - Bias) << 23)) & (r > Largest), splat<U>(Overflow), r);
      const U sign = (bits >> 24) & 0x80u;
      return select_bits((magnitude > 0x7f800000u) | (r == Nan), splat<U>(Nan), r | sign);
    }
  };
  typedef uint8_t Storage;
  typedef float Accumulator;
  template <int N>
  static GAR_MEMBER Lanes<float, N> widen(const Lanes<uint8_t, N>& a) {
    return bits_float(apply<Widen, N>(convert<uint32_t>(a)));
  }
  template <int N>
  static GAR_MEMBER Lanes<uint8_t, N> round(const Lanes<float, N>& a) {
    return convert<uint8_t>(apply<Narrow, N>(float_bits(a)));
  }
};
template <>
struct Element<Float8E4M3FN> : Float8<3, 7, 0x7e, 0x7f, 0x7f> {};
template <>
struct Element<Float8E5M2> : Float8<2, 15, 0x7b, 0x7c, 0x7e> {};

}  // namespace gar
