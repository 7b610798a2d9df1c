// Streams by their handles, and host functions in them.
// Knows nothing of how streams run.
#include "driver_streams.h"

#include <algorithm>

#include "driver_capture.h"

namespace emulated {

static std::unordered_map<CUstream, StreamPtr>& handles() {
  static auto& only = *new std::unordered_map<CUstream, StreamPtr>;
  return only;
}

static CUstream handle_of(const Stream& stream) { return reinterpret_cast<CUstream>(const_cast<Stream*>(&stream)); }

// Ends a per-thread stream with its thread.
struct PerThreadStreams {
  ~PerThreadStreams() {
    if (state().forked) return;
    Lock lock(state().lock);
    for (Context* context : state().contexts) {
      const auto found = context->per_thread.find(std::this_thread::get_id());
      if (found == context->per_thread.end()) continue;
      leave_capture(*found->second);
      leave_orphan(*found->second);
      context->per_thread.erase(found);
    }
  }
};

static StreamPtr per_thread_stream(Context& context) {
  static thread_local PerThreadStreams ends_with_thread;
  (void)ends_with_thread;
  StreamPtr& stream = context.per_thread[std::this_thread::get_id()];
  if (stream == nullptr) stream = make_stream(context, 0, 0, false);
  return stream;
}

CUresult find_stream(CUstream handle, StreamPtr* out) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
    const auto& stack = context_stack();
    Context* context = nullptr;
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    RETURN_IF_ERROR(find_context(stack.back(), &context));
    *out = handle == CU_STREAM_PER_THREAD ? per_thread_stream(*context) : context->legacy;
    return CUDA_SUCCESS;
  }
  const auto found = handles().find(handle);
  if (found == handles().end()) return CUDA_ERROR_INVALID_HANDLE;
  *out = found->second;
  return (*out)->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult usable_stream(CUstream handle, StreamPtr* out) {
  RETURN_IF_ERROR(find_stream(handle, out));
  return CUresult((*out)->context->error.load());
}

static CUresult create(CUstream* out, unsigned flags, int priority) {
  ENTER_CONTEXT(context);
  if (out == nullptr || (flags & ~unsigned(CU_STREAM_NON_BLOCKING)) != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  const StreamPtr stream = make_stream(*context, flags, std::max(-5, std::min(0, priority)), false);
  context->streams.insert(stream);
  *out = handle_of(*stream);
  handles()[*out] = stream;
  return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuStreamCreate(CUstream* out, unsigned int flags) { return create(out, flags, 0); }

EMULATED_API CUresult cuStreamCreateWithPriority(CUstream* out, unsigned int flags, int priority) {
  return create(out, flags, priority);
}

EMULATED_API CUresult cuStreamDestroy(CUstream handle) {
  ENTER();
  Lock lock(state().lock);
  const auto found = handles().find(handle);
  if (found == handles().end()) return CUDA_ERROR_INVALID_HANDLE;
  const StreamPtr stream = found->second;
  handles().erase(found);
  leave_capture(*stream);
  leave_orphan(*stream);
  stream->context->streams.erase(stream);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamQuery(CUstream handle) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  RETURN_IF_ERROR(refuse_captured(*stream));
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  for (const DonePtr& done : pending(*stream))
    if (!is_done(done)) return CUDA_ERROR_NOT_READY;
  return CUresult(stream->context->error.load());
}

EMULATED_API CUresult cuStreamSynchronize(CUstream handle) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  RETURN_IF_ERROR(refuse_captured(*stream));
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  for (const DonePtr& done : pending(*stream)) wait_for(lock, done);
  return CUresult(stream->context->error.load());
}

EMULATED_API CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_stream(handle, &stream));
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_stream(handle, &stream));
  *flags = stream->flags;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_stream(handle, &stream));
  *id = stream->id;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_stream(handle, &stream));
  *context = reinterpret_cast<CUcontext>(stream->context);
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuStreamGetDevice(CUstream handle, CUdevice* device) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_stream(handle, &stream));
  *device = stream->context->device;
  return CUDA_SUCCESS;
}

// Runs a callback under the rule that it must not call the driver.
static CUresult call_host(const std::function<void()>& call) {
  in_host_function() = true;
  call();
  in_host_function() = false;
  return CUDA_SUCCESS;
}

EMULATED_API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Operation operation = {stream->context, [=] { return call_host([=] { function(data); }); }};
  operation.type = CU_GRAPH_NODE_TYPE_HOST;
  return submit(*stream, std::move(operation));
}

EMULATED_API CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void* data, unsigned int flags) {
  ENTER();
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(usable_stream(handle, &stream));
  if (callback == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  RETURN_IF_ERROR(refuse_captured(*stream));
  Context* context = stream->context;
  Operation operation = {context,
                         [=] { return call_host([=] { callback(handle, CUresult(context->error.load()), data); }); }};
  operation.even_after_error = true;
  return submit(*stream, std::move(operation));
}
