// Reduction operators on lanes of the accumulator type.
// Knows nothing of storage, memory or ranks. To add one: a functor here and a row in gpuallreduce/types.py.
#pragma once

#include "dtypes.cuh"

namespace gar {

// combine(a, b): a is the fold of the lower ranks. finish(a, nranks): after the last rank, before rounding.
struct NoFinish {
  template <class A, class L>
  static GAR_MEMBER L finish(const L& a, uint32_t) {
    return a;
  }
};
struct Sum : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return a + b;
  }
};
struct Avg : Sum {
  template <class A, class L>
  static GAR_MEMBER L finish(const L& a, uint32_t nranks) {
    return a / A(nranks);
  }
};
struct Prod : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return a * b;
  }
};
// As np.maximum and np.minimum: a NaN on either side wins. Equal values keep the lower rank's (+0 and -0 are equal).
struct Max : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return select((a >= b) | (a != a), a, b);
  }
};
struct Min : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return select((a <= b) | (a != a), a, b);
  }
};
struct BitAnd : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return a & b;
  }
};
struct BitOr : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return a | b;
  }
};
struct BitXor : NoFinish {
  template <class L>
  static GAR_MEMBER L combine(const L& a, const L& b) {
    return a ^ b;
  }
};

}  // namespace gar
