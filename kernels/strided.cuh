// Copies between arrays of any strides, which calls need where strides leave holes.
// Knows nothing of ranks: it is one GPU's own work.
#pragma once

#include "platform.cuh"

namespace gar {

// Word: the unsigned integer as wide as an element. Neighbouring threads take neighbouring elements of the last axis.
template <class Word>
GAR_DEVICE bool strided_copy(const Block& block, const GarStridedArgs& args) {
  const uint64_t stride = uint64_t(block.count()) * block.threads();
  for (uint64_t i = uint64_t(block.index()) * block.threads() + block.thread(); i < args.count; i += stride) {
    uint64_t rest = i;
    int64_t from = 0, to = 0;
    for (uint32_t axis = args.naxes; axis-- > 0;) {
      const int64_t at = int64_t(rest % args.shape[axis]);
      rest /= args.shape[axis];
      from += at * args.source_strides[axis];
      to += at * args.target_strides[axis];
    }
    *reinterpret_cast<Word*>(static_cast<char*>(args.target) + to) =
        *reinterpret_cast<const Word*>(static_cast<const char*>(args.source) + from);
  }
  return true;
}

}  // namespace gar
