// Lanes as a plain array with elementwise operators: all element types on CUDA, complex on the host.
// Knows nothing of memory or element encodings.
#pragma once

namespace gar {

template <class E, int N>
struct ArrayLanes {
  E v[N];
};

#define GAR_LANEWISE(op)                                                                          \
  template <class E, int N>                                                                       \
  GAR_DEVICE ArrayLanes<E, N> operator op(const ArrayLanes<E, N>& a, const ArrayLanes<E, N>& b) { \
    ArrayLanes<E, N> r;                                                                           \
    GAR_UNROLL for (int i = 0; i < N; ++i)                                                        \
      r.v[i] = E(a.v[i] op b.v[i]);                                                               \
    return r;                                                                                     \
  }
GAR_LANEWISE(+)
GAR_LANEWISE(&)
GAR_LANEWISE(|)
GAR_LANEWISE(^)
#undef GAR_LANEWISE

template <class E>
GAR_DEVICE E wrapping_product(const E& a, const E& b) {
  return a * b;
}
// Short integers are promoted to int, whose overflow is undefined.
GAR_DEVICE uint8_t wrapping_product(const uint8_t& a, const uint8_t& b) { return uint8_t(uint32_t(a) * b); }
GAR_DEVICE uint16_t wrapping_product(const uint16_t& a, const uint16_t& b) { return uint16_t(uint32_t(a) * b); }
template <class E, int N>
GAR_DEVICE ArrayLanes<E, N> operator*(const ArrayLanes<E, N>& a, const ArrayLanes<E, N>& b) {
  ArrayLanes<E, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = wrapping_product(a.v[i], b.v[i]);
  return r;
}

#define GAR_LANEWISE_COMPARE(op)                                                                     \
  template <class E, int N>                                                                          \
  GAR_DEVICE ArrayLanes<bool, N> operator op(const ArrayLanes<E, N>& a, const ArrayLanes<E, N>& b) { \
    ArrayLanes<bool, N> r;                                                                           \
    GAR_UNROLL for (int i = 0; i < N; ++i)                                                           \
      r.v[i] = a.v[i] op b.v[i];                                                                     \
    return r;                                                                                        \
  }
GAR_LANEWISE_COMPARE(>=)
GAR_LANEWISE_COMPARE(<=)
GAR_LANEWISE_COMPARE(!=)
#undef GAR_LANEWISE_COMPARE

template <class E, class S, int N>
GAR_DEVICE ArrayLanes<E, N> operator/(const ArrayLanes<E, N>& a, S divisor) {
  ArrayLanes<E, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = a.v[i] / divisor;
  return r;
}

template <class E, int N>
GAR_DEVICE ArrayLanes<E, N> select(const ArrayLanes<bool, N>& mask, const ArrayLanes<E, N>& a,
                                   const ArrayLanes<E, N>& b) {
  ArrayLanes<E, N> r;
  GAR_UNROLL for (int i = 0; i < N; ++i)
    r.v[i] = mask.v[i] ? a.v[i] : b.v[i];
  return r;
}

}  // namespace gar
