// Contexts: primary and others, the stack of current ones, and peer access between them.
// Knows nothing of memory or streams but that they end with their context.
#include "driver_capture.h"
#include "driver_memory.h"
#include "driver_modules.h"
#include "driver_streams.h"

namespace emulated {

std::vector<CUcontext>& context_stack() {
  static thread_local std::vector<CUcontext> stack;
  return stack;
}

CUresult find_context(CUcontext handle, Context** out) {
  Context* context = reinterpret_cast<Context*>(handle);
  if (state().contexts.count(context) == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  *out = context;
  return CUDA_SUCCESS;
}

CUresult current_context(Context** out) {
  const auto& stack = context_stack();
  if (stack.empty() || stack.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(stack.back(), out));
  return CUresult((*out)->error.load());
}

Device& device_of(const Context& context) { return *state().devices[size_t(context.device)]; }

void bring_up(Context& context) {
  if (context.alive) return;
  context.alive = true;
  context.error = 0;
  context.legacy = make_stream(context, 0, 0, true);
}

void tear_down(Context& context) {
  State& all = state();
  Lock lock(all.lock);
  if (!context.alive) return;
  synchronize(lock, context);
  context.alive = false;
  auto streams = context.streams;
  for (const auto& [thread, stream] : context.per_thread) streams.insert(stream);
  streams.insert(context.legacy);
  for (const StreamPtr& stream : streams) {
    leave_capture(*stream);
    stream->destroyed = true;
    stream->wake.notify_all();
  }
  context.streams.clear();
  context.per_thread.clear();
  context.legacy.reset();
  context.orphans.clear();
  context.peers.clear();
  for (Context* other : all.contexts) other->peers.erase(&context);
  release_all(context);
  lock.unlock();
  unload_modules(context);
}

static CUresult create(CUcontext* out, unsigned flags, CUdevice device) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* context = new Context;
  context->device = device;
  context->flags = flags;
  Lock lock(state().lock);
  state().contexts.insert(context);
  bring_up(*context);
  *out = reinterpret_cast<CUcontext>(context);
  context_stack().push_back(*out);
  return CUDA_SUCCESS;
}

static CUcontext handle_of(Context* context) { return reinterpret_cast<CUcontext>(context); }

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  bring_up(found->primary);
  ++found->primary_references;
  *out = handle_of(&found->primary);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  {
    Lock lock(state().lock);
    if (found->primary_references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--found->primary_references > 0) return CUDA_SUCCESS;
  }
  tear_down(found->primary);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  tear_down(found->primary);
  Lock lock(state().lock);
  if (found->primary_references > 0) bring_up(found->primary);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  *flags = found->primary_flags;
  *active = found->primary.alive;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
  Device* found = nullptr;
  ENTER();
  RETURN_IF_ERROR(find_device(device, &found));
  Lock lock(state().lock);
  found->primary_flags = found->primary.flags = flags;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxCreate(CUcontext* out, CUctxCreateParams* params, unsigned int flags, CUdevice device) {
  if (params != nullptr && (params->numExecAffinityParams != 0 || params->cigParams != nullptr))
    return CUDA_ERROR_NOT_SUPPORTED;
  return create(out, flags, device);
}

EMULATED_API CUresult cuCtxCreate_v2(CUcontext* out, unsigned int flags, CUdevice device) {
  return create(out, flags, device);
}

EMULATED_API CUresult cuCtxDestroy(CUcontext handle) {
  ENTER();
  Context* context = nullptr;
  {
    Lock lock(state().lock);
    RETURN_IF_ERROR(find_context(handle, &context));
  }
  if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  // The object stays: handles to it may be about, and must be told apart from new contexts.
  tear_down(*context);
  auto& stack = context_stack();
  if (!stack.empty() && stack.back() == handle) stack.pop_back();
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxPushCurrent(CUcontext handle) {
  ENTER();
  Context* context = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(handle, &context));
  context_stack().push_back(handle);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxPopCurrent(CUcontext* out) {
  ENTER();
  auto& stack = context_stack();
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (out != nullptr) *out = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxSetCurrent(CUcontext handle) {
  ENTER();
  auto& stack = context_stack();
  if (handle == nullptr) {
    if (!stack.empty()) stack.pop_back();
    return CUDA_SUCCESS;
  }
  Context* context = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(handle, &context));
  if (stack.empty()) stack.push_back(handle);
  stack.back() = handle;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetCurrent(CUcontext* out) {
  ENTER();
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto& stack = context_stack();
  *out = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetDevice(CUdevice* out) {
  ENTER();
  Context* context = nullptr;
  // Asked by those who clean up, too: a sticky error is no obstacle.
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (context_stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(context_stack().back(), &context));
  *out = context->device;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetDevice_v2(CUdevice* out, CUcontext handle) {
  if (handle == nullptr) return cuCtxGetDevice(out);
  ENTER();
  Context* context = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(handle, &context));
  *out = context->device;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetFlags(unsigned int* flags) {
  ENTER_CONTEXT(context);
  if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = context->flags;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  ENTER();
  if (handle == nullptr) cuCtxGetCurrent(&handle);
  Context* context = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_context(handle, &context));
  *id = reinterpret_cast<uintptr_t>(context);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  ENTER();
  (void)handle;
  *version = 3020;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER_CONTEXT(context);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuCtxSynchronize(void) {
  ENTER_CONTEXT(context);
  Lock lock(state().lock);
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  return synchronize(lock, *context);
}

EMULATED_API CUresult cuCtxGetLimit(size_t* out, CUlimit which) {
  ENTER_CONTEXT(context);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_LIMIT_STACK_SIZE:
      *out = 1024;
      return CUDA_SUCCESS;
    case CU_LIMIT_PRINTF_FIFO_SIZE:
      *out = 7 << 20;
      return CUDA_SUCCESS;
    case CU_LIMIT_MALLOC_HEAP_SIZE:
      *out = 8 << 20;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_UNSUPPORTED_LIMIT;
  }
}

EMULATED_API CUresult cuCtxSetLimit(CUlimit, size_t) {
  ENTER_CONTEXT(context);
  return CUDA_ERROR_UNSUPPORTED_LIMIT;
}
