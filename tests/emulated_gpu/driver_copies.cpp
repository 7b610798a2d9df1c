// Copies and fills, and what they check before they run and when they run.
// Knows nothing of kernels.
#include <algorithm>
#include <cstring>

#include "driver_capture.h"
#include "driver_faults.h"
#include "driver_memory.h"
#include "driver_streams.h"

namespace emulated {

// A pageable source up to this size may still be on its way to the device when a synchronous copy returns.
static constexpr size_t kStagedBytes = 64 << 10;

enum class Place { kDevice, kHost, kAny };

// One side of a copy.
struct Side {
  uintptr_t address = 0;
  Place place = Place::kAny;
  bool peer = false;  // named with its context: any device may be reached
  bool pageable = false;
};

struct Rectangle {
  size_t width = 0;  // bytes of a row
  size_t height = 1;
  size_t to_pitch = 0;
  size_t from_pitch = 0;
  static size_t span(size_t width, size_t height, size_t pitch) {
    return width == 0 || height == 0 ? 0 : (height - 1) * pitch + width;
  }
};

static bool reaches_by_copy(const Context& context, const Allocation& found, bool peer) {
  // Copy engines cross devices without peer access, but pools are mapped for their own device until access is granted.
  return peer || found.kind != Kind::kPooled || can_reach(context, found);
}

static CUresult check_side(const Context& context, Side* side, size_t bytes) {
  if (bytes == 0) return CUDA_SUCCESS;
  const AllocationPtr found = find_allocation(side->address, bytes);
  if (found == nullptr) {
    // Freed memory, or a range that runs over the end of an allocation.
    const bool starts_inside = find_allocation(side->address) != nullptr;
    if (side->place == Place::kDevice || in_arena(side->address) || starts_inside || side->address == 0)
      return CUDA_ERROR_INVALID_VALUE;
    side->pageable = true;
    return CUDA_SUCCESS;
  }
  const bool host = found->kind == Kind::kHost || found->kind == Kind::kRegistered;
  const bool managed = found->kind == Kind::kManaged;
  if (side->place == Place::kHost && !host && !managed) return CUDA_ERROR_INVALID_VALUE;
  return reaches_by_copy(context, *found, side->peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The same when the stream gets there: memory may have been freed, or a stream-ordered allocation not be reached yet.
static CUresult check_alive(const Context& context, const Side& side, size_t bytes) {
  if (bytes == 0 || side.pageable) return CUDA_SUCCESS;
  const AllocationPtr found = find_allocation(side.address, bytes);
  if (found == nullptr || !found->live || !reaches_by_copy(context, *found, side.peer))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return CUDA_SUCCESS;
}

static void copy_rows(uintptr_t to, uintptr_t from, const Rectangle& shape) {
  for (size_t row = 0; row < shape.height; ++row)
    memmove(reinterpret_cast<void*>(to + row * shape.to_pitch),
            reinterpret_cast<const void*>(from + row * shape.from_pitch), shape.width);
}

static CUresult run_copy(const Context& context, const Side& to, const Side& from, const Rectangle& shape) {
  {
    Lock lock(state().lock);
    RETURN_IF_ERROR(check_alive(context, to, Rectangle::span(shape.width, shape.height, shape.to_pitch)));
    RETURN_IF_ERROR(check_alive(context, from, Rectangle::span(shape.width, shape.height, shape.from_pitch)));
  }
  const bool survived = survives([&] { copy_rows(to.address, from.address, shape); });
  return survived ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

// Reads a pageable source now, as the driver does for asynchronous copies from pageable memory.
static std::shared_ptr<std::vector<char>> stage(Side* from, Rectangle* shape) {
  auto staged = std::make_shared<std::vector<char>>(shape->width * shape->height);
  Rectangle packed = *shape;
  packed.to_pitch = shape->width;
  copy_rows(reinterpret_cast<uintptr_t>(staged->data()), from->address, packed);
  from->address = reinterpret_cast<uintptr_t>(staged->data());
  shape->from_pitch = shape->width;
  return staged;
}

static CUresult copy(CUstream handle, bool asynchronous, Side to, Side from, Rectangle shape) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  Context& context = *stream->context;
  const size_t to_bytes = Rectangle::span(shape.width, shape.height, shape.to_pitch);
  const size_t from_bytes = Rectangle::span(shape.width, shape.height, shape.from_pitch);
  RETURN_IF_ERROR(check_side(context, &to, to_bytes));
  RETURN_IF_ERROR(check_side(context, &from, from_bytes));
  if (to_bytes == 0) return CUDA_SUCCESS;
  if (!asynchronous) RETURN_IF_ERROR(refuse_unsafe_in_capture());
  const bool capturing = stream->capture != nullptr;
  const bool to_host = to.pageable, from_host = from.pageable;
  std::shared_ptr<std::vector<char>> staged;
  if (from.pageable && !to.pageable && !capturing && (asynchronous || to_bytes <= kStagedBytes))
    staged = stage(&from, &shape);
  Operation operation = {&context, [&context, to, from, shape, staged] { return run_copy(context, to, from, shape); }};
  operation.type = CU_GRAPH_NODE_TYPE_MEMCPY;
  DonePtr done;
  RETURN_IF_ERROR(submit(*stream, std::move(operation), &done));
  if (capturing) return CUDA_SUCCESS;
  // Copies within and between devices, and staged ones, return before they end; as documented.
  const auto is_host = [](const Side& side) {
    const AllocationPtr found = find_allocation(side.address);
    return found == nullptr || found->kind == Kind::kHost || found->kind == Kind::kRegistered;
  };
  const bool waits =
      asynchronous ? to_host || (from_host && staged == nullptr) : staged == nullptr && (is_host(to) || is_host(from));
  if (waits) wait_for(lock, done);
  return waits ? CUresult(context.error.load()) : CUDA_SUCCESS;
}

static Rectangle line(size_t bytes) { return {bytes, 1, bytes, bytes}; }
static Side device(CUdeviceptr address) { return {address, Place::kDevice}; }
static Side host(const void* address) { return {reinterpret_cast<uintptr_t>(address), Place::kHost}; }
static Side any(CUdeviceptr address) { return {address, Place::kAny}; }

static CUresult copy_peer(CUstream stream, bool asynchronous, CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                          CUcontext from_context, size_t bytes) {
  ENTER();
  {
    Lock lock(state().lock);
    Context* context = nullptr;
    for (const auto& [handle, address] : {std::pair(to_context, to), std::pair(from_context, from)}) {
      RETURN_IF_ERROR(find_context(handle, &context));
      const AllocationPtr found = find_allocation(address);
      // The context says where the memory is, so it must be there.
      if (bytes != 0 && found != nullptr && found->kind == Kind::kDevice && found->context != context)
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  Side to_side = device(to), from_side = device(from);
  to_side.peer = from_side.peer = true;
  return copy(stream, asynchronous, to_side, from_side, line(bytes));
}

static CUresult side_of_2d(CUmemorytype type, const void* host_address, CUdeviceptr address, size_t x, size_t y,
                           size_t pitch, Side* out) {
  if (type == CU_MEMORYTYPE_HOST)
    *out = host(host_address);
  else if (type == CU_MEMORYTYPE_DEVICE)
    *out = device(address);
  else if (type == CU_MEMORYTYPE_UNIFIED)
    *out = any(address);
  else
    return CUDA_ERROR_NOT_SUPPORTED;
  out->address += y * pitch + x;
  return CUDA_SUCCESS;
}

static CUresult copy_2d(CUstream stream, bool asynchronous, const CUDA_MEMCPY2D* what) {
  if (what == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Side to, from;
  const size_t to_pitch = what->dstPitch != 0 ? what->dstPitch : what->WidthInBytes;
  const size_t from_pitch = what->srcPitch != 0 ? what->srcPitch : what->WidthInBytes;
  if (to_pitch < what->WidthInBytes || from_pitch < what->WidthInBytes) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_ERROR(
      side_of_2d(what->dstMemoryType, what->dstHost, what->dstDevice, what->dstXInBytes, what->dstY, to_pitch, &to));
  RETURN_IF_ERROR(side_of_2d(what->srcMemoryType, what->srcHost, what->srcDevice, what->srcXInBytes, what->srcY,
                             from_pitch, &from));
  return copy(stream, asynchronous, to, from, {what->WidthInBytes, what->Height, to_pitch, from_pitch});
}

template <class Value>
static CUresult fill(CUstream handle, bool asynchronous, CUdeviceptr to, size_t pitch, Value value, size_t width,
                     size_t height) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  Context& context = *stream->context;
  if (to % sizeof(Value) != 0 || (height > 1 && pitch < width * sizeof(Value))) return CUDA_ERROR_INVALID_VALUE;
  Side side = device(to);
  const size_t bytes = Rectangle::span(width * sizeof(Value), height, pitch);
  RETURN_IF_ERROR(check_side(context, &side, bytes));
  if (bytes == 0) return CUDA_SUCCESS;
  if (!asynchronous) RETURN_IF_ERROR(refuse_unsafe_in_capture());
  Operation operation = {&context, [=, &context] {
                           {
                             Lock inner(state().lock);
                             RETURN_IF_ERROR(check_alive(context, side, bytes));
                           }
                           const bool survived = survives([&] {
                             for (size_t row = 0; row < height; ++row)
                               std::fill_n(reinterpret_cast<Value*>(to + row * pitch), width, value);
                           });
                           return survived ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
                         }};
  operation.type = CU_GRAPH_NODE_TYPE_MEMSET;
  DonePtr done;
  RETURN_IF_ERROR(submit(*stream, std::move(operation), &done));
  const AllocationPtr found = find_allocation(to);
  const bool waits = !asynchronous &&
                     (found->kind == Kind::kHost || found->kind == Kind::kRegistered || found->kind == Kind::kManaged);
  if (waits) wait_for(lock, done);
  return waits ? CUresult(context.error.load()) : CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(nullptr, false, any(to), any(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(stream, true, any(to), any(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return copy(nullptr, false, device(to), host(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy(stream, true, device(to), host(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return copy(nullptr, false, host(to), device(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(stream, true, host(to), device(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy(nullptr, false, device(to), device(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy(stream, true, device(to), device(from), line(bytes));
}
EMULATED_API CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                   size_t bytes) {
  return copy_peer(nullptr, false, to, to_context, from, from_context, bytes);
}
EMULATED_API CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                        size_t bytes, CUstream stream) {
  return copy_peer(stream, true, to, to_context, from, from_context, bytes);
}
EMULATED_API CUresult cuMemcpy2D(const CUDA_MEMCPY2D* what) { return copy_2d(nullptr, false, what); }
EMULATED_API CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* what) { return copy_2d(nullptr, false, what); }
EMULATED_API CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* what, CUstream stream) {
  return copy_2d(stream, true, what);
}

EMULATED_API CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  return fill(nullptr, false, to, count, value, count, 1);
}
EMULATED_API CUresult cuMemsetD16(CUdeviceptr to, unsigned short value, size_t count) {
  return fill(nullptr, false, to, count, value, count, 1);
}
EMULATED_API CUresult cuMemsetD32(CUdeviceptr to, unsigned int value, size_t count) {
  return fill(nullptr, false, to, count, value, count, 1);
}
EMULATED_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return fill(stream, true, to, count, value, count, 1);
}
EMULATED_API CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return fill(stream, true, to, count, value, count, 1);
}
EMULATED_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
  return fill(stream, true, to, count, value, count, 1);
}
EMULATED_API CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                        CUstream stream) {
  return fill(stream, true, to, pitch, value, width, height);
}
EMULATED_API CUresult cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                                         CUstream stream) {
  return fill(stream, true, to, pitch, value, width, height);
}
EMULATED_API CUresult cuMemsetD2D8(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
  return fill(nullptr, false, to, pitch, value, width, height);
}
