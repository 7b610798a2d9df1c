// Modules and functions: images loaded into this process.
// Knows nothing of launches.
#pragma once

#include "driver_state.h"

namespace emulated {

// A kernel as an image exports it: runs one block of nblocks.
using Entry = int (*)(const void* params, uint32_t block, uint32_t nblocks);

inline const std::string kParamsSuffix = "_params_bytes";

struct Image {
  void* handle = nullptr;
  std::vector<std::string> kernels;
  ~Image();
};

// Loads an image; its own copy, however often it is loaded.
CUresult load_image(const void* data, std::shared_ptr<Image>* out);
CUresult load_file(const char* path, std::vector<char>* out);

struct Function {
  std::string name;
  std::shared_ptr<Image> image;
  struct Module* module = nullptr;
  Context* context = nullptr;  // nullptr: of a library, for any context
  Entry entry = nullptr;
  uint32_t params_bytes = 0;
  int shared_bytes_limit = kSharedBytesPerBlock;
};

// A function by its handle, which may be that of a kernel of a library. Under the lock.
CUresult find_function(CUfunction handle, Function** out);

// Ends the modules of a context. Not under the lock: unloading runs code of the image.
void unload_modules(const Context& context);

// Blocks of a kernel that one multiprocessor holds.
int blocks_per_multiprocessor(unsigned block_threads, size_t shared_bytes);

}  // namespace emulated
