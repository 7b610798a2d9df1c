// Launches: copies the parameters, and when the stream gets there runs all blocks at once, as far as they fit.
// Knows nothing of images or streams beyond their handles.
#include <algorithm>
#include <cstdio>

#include "driver_capture.h"
#include "driver_faults.h"
#include "driver_lies.h"
#include "driver_memory.h"
#include "driver_modules.h"
#include "driver_workers.h"

namespace emulated {

struct Launch {
  Context* context = nullptr;
  std::shared_ptr<Image> image;
  std::string name;
  Entry entry = nullptr;
  std::vector<uint64_t> params;  // words, so that the struct is aligned
  size_t params_bytes = 0;
  uint32_t nblocks = 0;
  int64_t block_cost = 0;  // threads of a multiprocessor that one block takes
  bool cooperative = false;
};

// What the blocks of one running kernel share.
struct Running {
  std::mutex lock;
  std::condition_variable ended;
  uint32_t pending = 0;
  std::atomic<bool> faulted{false};
};

static void run_block(const Launch& launch, Running& running, Residency& residency, uint32_t block) {
  const bool survived = survives([&] { launch.entry(launch.params.data(), block, launch.nblocks); });
  if (!survived) running.faulted = true;
  {
    std::lock_guard<std::mutex> lock(residency.lock);
    residency.free_threads += launch.block_cost;
  }
  residency.changed.notify_all();
  // Under the lock: once pending is zero the object is gone.
  std::lock_guard<std::mutex> lock(running.lock);
  if (--running.pending == 0) running.ended.notify_all();
}

// Runs a kernel to its end. Blocks come onto the device in order, those of the next kernel after all of this one's.
static CUresult run_kernel(const Launch& launch) {
  {
    Lock lock(state().lock);
    const CUresult result = check_params(*launch.context, launch.params.data(), launch.params_bytes);
    if (result != CUDA_SUCCESS) {
      std::fprintf(stderr, "emulated GPU: kernel %s on device %d was given memory that this device cannot reach\n",
                   launch.name.c_str(), launch.context->device);
      return result;
    }
  }
  watch_faults();
  Residency& residency = device_of(*launch.context).residency;
  Running running;
  running.pending = launch.nblocks;
  std::unique_lock<std::mutex> lock(residency.lock);
  const uint64_t ticket = residency.next_ticket++;
  residency.changed.wait(lock, [&] { return residency.serving == ticket; });
  if (launch.cooperative)
    residency.changed.wait(lock, [&] { return residency.free_threads >= launch.block_cost * launch.nblocks; });
  uint32_t started = 0;
  while (started < launch.nblocks && !running.faulted) {
    residency.changed.wait(lock, [&] { return residency.free_threads >= launch.block_cost || running.faulted; });
    if (running.faulted) break;
    residency.free_threads -= launch.block_cost;
    if (++started == launch.nblocks) break;
    run_at_once([&launch, &running, &residency, block = started - 1] { run_block(launch, running, residency, block); });
  }
  ++residency.serving;
  lock.unlock();
  residency.changed.notify_all();
  // The last block runs on the stream's own thread, which has nothing else to do.
  if (started == launch.nblocks) run_block(launch, running, residency, started - 1);
  std::unique_lock<std::mutex> end(running.lock);
  running.pending -= launch.nblocks - started;
  running.ended.wait(end, [&] { return running.pending == 0; });
  if (!running.faulted) return CUDA_SUCCESS;
  std::fprintf(stderr, "emulated GPU: kernel %s on device %d touched memory outside of allocations\n",
               launch.name.c_str(), launch.context->device);
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

struct Shape {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  bool cooperative;
};

static CUresult copy_params(const Function& function, void** params, void** extra, Launch* launch) {
  launch->params.resize((function.params_bytes + 7) / 8);
  launch->params_bytes = function.params_bytes;
  if (function.params_bytes == 0) return CUDA_SUCCESS;
  const void* from = nullptr;
  if (params != nullptr) {
    from = params[0];
  } else if (extra != nullptr) {
    size_t bytes = 0;
    for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
      if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
        from = extra[i + 1];
      else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
        bytes = *static_cast<const size_t*>(extra[i + 1]);
      else
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (bytes < function.params_bytes) return CUDA_ERROR_INVALID_VALUE;
  }
  if (from == nullptr) return CUDA_ERROR_INVALID_VALUE;
  memcpy(launch->params.data(), from, function.params_bytes);
  return CUDA_SUCCESS;
}

static CUresult check_shape(const Function& function, const Shape& shape) {
  const uint64_t threads = uint64_t(shape.block[0]) * shape.block[1] * shape.block[2];
  if (shape.grid[0] == 0 || shape.grid[1] == 0 || shape.grid[2] == 0 || threads == 0) return CUDA_ERROR_INVALID_VALUE;
  if (threads > kThreadsPerBlock || shape.grid[0] > 0x7fffffffu) return CUDA_ERROR_INVALID_VALUE;
  if (shape.grid[1] != 1 || shape.grid[2] != 1) return CUDA_ERROR_NOT_SUPPORTED;
  if (shape.shared_bytes > unsigned(function.shared_bytes_limit)) return CUDA_ERROR_INVALID_VALUE;
  const int resident = blocks_per_multiprocessor(unsigned(threads), shape.shared_bytes);
  if (shape.cooperative && shape.grid[0] > uint64_t(state().settings.multiprocessors) * unsigned(resident))
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction handle, const Shape& shape, CUstream stream_handle, void** params, void** extra) {
  ENTER_CONTEXT(current);
  Function* function = nullptr;
  StreamPtr stream;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_function(handle, &function));
  RETURN_IF_ERROR(usable_stream(stream_handle, &stream));
  if (stream->context != current) return CUDA_ERROR_INVALID_HANDLE;
  if (function->context != nullptr && function->context != current) return CUDA_ERROR_INVALID_HANDLE;
  RETURN_IF_ERROR(check_shape(*function, shape));
  const unsigned threads = shape.block[0] * shape.block[1] * shape.block[2];
  auto made = std::make_shared<Launch>();
  RETURN_IF_ERROR(copy_params(*function, params, extra, made.get()));
  mislead(*current, made->params.data(), made->params_bytes);
  made->context = current;
  made->image = function->image;
  made->name = function->name;
  made->entry = function->entry;
  made->nblocks = shape.grid[0];
  made->block_cost = kThreadsPerMultiprocessor / blocks_per_multiprocessor(threads, shape.shared_bytes);
  made->cooperative = shape.cooperative;
  Operation operation = {current, [made] { return run_kernel(*made); }};
  operation.type = CU_GRAPH_NODE_TYPE_KERNEL;
  return submit(*stream, std::move(operation));
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz,
                                     unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared_bytes,
                                     CUstream stream, void** params, void** extra) {
  return launch(function, {{gx, gy, gz}, {bx, by, bz}, shared_bytes, false}, stream, params, extra);
}

EMULATED_API CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz,
                                                unsigned int bx, unsigned int by, unsigned int bz,
                                                unsigned int shared_bytes, CUstream stream, void** params) {
  return launch(function, {{gx, gy, gz}, {bx, by, bz}, shared_bytes, true}, stream, params, nullptr);
}

EMULATED_API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Shape shape = {{config->gridDimX, config->gridDimY, config->gridDimZ},
                 {config->blockDimX, config->blockDimY, config->blockDimZ},
                 config->sharedMemBytes,
                 false};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        shape.cooperative = attribute.value.cooperative != 0;
        break;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return launch(function, shape, config->hStream, params, extra);
}
