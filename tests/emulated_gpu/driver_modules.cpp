// Modules and libraries, and the kernels found in them.
// Knows nothing of launches or of what an image is.
#include "driver_modules.h"

#include <dlfcn.h>

#include "driver_capture.h"

namespace emulated {

// A module, or a library with its kernels.
struct Module {
  Context* context = nullptr;
  std::shared_ptr<Image> image;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Modules {
  std::map<void*, std::unique_ptr<Module>> modules;
  std::map<void*, Function*> functions;
};

static Modules& loaded() {
  static Modules& only = *new Modules;
  return only;
}

static CUresult make_module(const void* data, Context* context, void** out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto module = std::make_unique<Module>();
  RETURN_IF_ERROR(load_image(data, &module->image));
  module->context = context;
  *out = module.get();
  Lock lock(state().lock);
  // Loading takes device memory, so it is as unsafe in a capture as an allocation.
  RETURN_IF_ERROR(refuse_unsafe_in_capture());
  if (context != nullptr && state().settings.strict_sync) synchronize(lock, *context);
  loaded().modules[*out] = std::move(module);
  return CUDA_SUCCESS;
}

static CUresult find_module(void* handle, Module** out) {
  const auto found = loaded().modules.find(handle);
  if (found == loaded().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  *out = found->second.get();
  return CUDA_SUCCESS;
}

static CUresult get_function(void* module_handle, const char* name, void** out) {
  ENTER();
  if (name == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(state().lock);
  Module* module = nullptr;
  RETURN_IF_ERROR(find_module(module_handle, &module));
  std::unique_ptr<Function>& function = module->functions[name];
  if (function == nullptr) {
    void* entry = dlsym(module->image->handle, name);
    const void* bytes = dlsym(module->image->handle, (name + kParamsSuffix).c_str());
    if (entry == nullptr || bytes == nullptr) {
      module->functions.erase(name);
      return CUDA_ERROR_NOT_FOUND;
    }
    function = std::make_unique<Function>();
    function->name = name;
    function->image = module->image;
    function->module = module;
    function->context = module->context;
    function->entry = reinterpret_cast<Entry>(entry);
    function->params_bytes = *static_cast<const uint32_t*>(bytes);
    loaded().functions[function.get()] = function.get();
  }
  *out = function.get();
  return CUDA_SUCCESS;
}

static CUresult unload(void* handle) {
  ENTER();
  std::unique_ptr<Module> module;
  Lock lock(state().lock);
  const auto found = loaded().modules.find(handle);
  if (found == loaded().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  module = std::move(found->second);
  loaded().modules.erase(found);
  for (const auto& [name, function] : module->functions) loaded().functions.erase(function.get());
  // Queued launches keep the image itself.
  lock.unlock();
  return CUDA_SUCCESS;
}

void unload_modules(const Context& context) {
  std::vector<void*> ours;
  {
    Lock lock(state().lock);
    for (const auto& [handle, module] : loaded().modules)
      if (module->context == &context) ours.push_back(handle);
  }
  for (void* handle : ours) unload(handle);
}

static CUresult count_kernels(unsigned* count, void* handle) {
  ENTER();
  Module* module = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_module(handle, &module));
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = unsigned(module->image->kernels.size());
  return CUDA_SUCCESS;
}

static CUresult enumerate(void** out, unsigned count, void* handle) {
  ENTER();
  std::vector<std::string> names;
  {
    Module* module = nullptr;
    Lock lock(state().lock);
    RETURN_IF_ERROR(find_module(handle, &module));
    names = module->image->kernels;
  }
  for (unsigned i = 0; i < count && i < names.size(); ++i)
    RETURN_IF_ERROR(get_function(handle, names[i].c_str(), &out[i]));
  return CUDA_SUCCESS;
}

CUresult find_function(CUfunction handle, Function** out) {
  const auto found = loaded().functions.find(handle);
  if (found == loaded().functions.end()) return CUDA_ERROR_INVALID_HANDLE;
  *out = found->second;
  return CUDA_SUCCESS;
}

}  // namespace emulated

using namespace emulated;

EMULATED_API CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  ENTER_CONTEXT(context);
  return make_module(image, context, reinterpret_cast<void**>(out));
}
EMULATED_API CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned int, CUjit_option*, void**) {
  return cuModuleLoadData(out, image);
}
EMULATED_API CUresult cuModuleLoadFatBinary(CUmodule* out, const void* image) { return cuModuleLoadData(out, image); }
EMULATED_API CUresult cuModuleLoad(CUmodule* out, const char* path) {
  std::vector<char> image;
  RETURN_IF_ERROR(load_file(path, &image));
  return cuModuleLoadData(out, image.data());
}
EMULATED_API CUresult cuModuleUnload(CUmodule module) { return unload(module); }
EMULATED_API CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  ENTER();
  *mode = CU_MODULE_EAGER_LOADING;
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  return get_function(module, name, reinterpret_cast<void**>(out));
}
EMULATED_API CUresult cuModuleGetFunctionCount(unsigned int* count, CUmodule module) {
  return count_kernels(count, module);
}
EMULATED_API CUresult cuModuleEnumerateFunctions(CUfunction* out, unsigned int count, CUmodule module) {
  return enumerate(reinterpret_cast<void**>(out), count, module);
}
EMULATED_API CUresult cuModuleGetGlobal(CUdeviceptr*, size_t*, CUmodule, const char*) {
  ENTER();
  return CUDA_ERROR_NOT_FOUND;
}

EMULATED_API CUresult cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option*, void**, unsigned int,
                                        CUlibraryOption*, void**, unsigned int) {
  ENTER();
  return make_module(image, nullptr, reinterpret_cast<void**>(out));
}
EMULATED_API CUresult cuLibraryLoadFromFile(CUlibrary* out, const char* path, CUjit_option*, void**, unsigned int,
                                            CUlibraryOption*, void**, unsigned int) {
  ENTER();
  std::vector<char> image;
  RETURN_IF_ERROR(load_file(path, &image));
  return make_module(image.data(), nullptr, reinterpret_cast<void**>(out));
}
EMULATED_API CUresult cuLibraryUnload(CUlibrary library) { return unload(library); }
EMULATED_API CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  return get_function(library, name, reinterpret_cast<void**>(out));
}
EMULATED_API CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary library) {
  return count_kernels(count, library);
}
EMULATED_API CUresult cuLibraryEnumerateKernels(CUkernel* out, unsigned int count, CUlibrary library) {
  return enumerate(reinterpret_cast<void**>(out), count, library);
}
EMULATED_API CUresult cuLibraryGetModule(CUmodule* out, CUlibrary library) {
  ENTER_CONTEXT(context);
  Module* module = nullptr;
  Lock lock(state().lock);
  RETURN_IF_ERROR(find_module(library, &module));
  *out = reinterpret_cast<CUmodule>(library);
  return CUDA_SUCCESS;
}
EMULATED_API CUresult cuLibraryGetGlobal(CUdeviceptr*, size_t*, CUlibrary, const char*) {
  ENTER();
  return CUDA_ERROR_NOT_FOUND;
}
EMULATED_API CUresult cuLibraryGetManaged(CUdeviceptr*, size_t*, CUlibrary, const char*) {
  ENTER();
  return CUDA_ERROR_NOT_FOUND;
}
