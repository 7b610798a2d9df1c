// Images: shared objects for this machine, told from other code, loaded, and asked for the kernels they export.
// Knows nothing of modules or devices.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "driver_modules.h"

namespace emulated {

Image::~Image() {
  if (handle != nullptr) dlclose(handle);
}

static bool is_for_this_machine(const Elf64_Ehdr& header) {
#if defined(__aarch64__)
  constexpr int kMachine = EM_AARCH64;
#else
  constexpr int kMachine = EM_X86_64;
#endif
  return header.e_type == ET_DYN && header.e_machine == kMachine && header.e_ident[EI_CLASS] == ELFCLASS64;
}

// An image's size stands in its headers: callers give only where it begins.
static size_t image_bytes(const char* image, const Elf64_Ehdr& header) {
  size_t end = header.e_shoff + size_t(header.e_shnum) * header.e_shentsize;
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    memcpy(&segment, image + header.e_phoff + i * size_t(header.e_phentsize), sizeof segment);
    end = std::max<size_t>(end, segment.p_offset + segment.p_filesz);
  }
  return end;
}

// Names of exported kernels: those beside a NAME_params_bytes.
static std::vector<std::string> kernel_names(const char* image, const Elf64_Ehdr& header) {
  std::vector<std::string> names;
  const auto section_at = [&](unsigned i) {
    Elf64_Shdr section;
    memcpy(&section, image + header.e_shoff + i * size_t(header.e_shentsize), sizeof section);
    return section;
  };
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr symbols = section_at(i);
    if (symbols.sh_type != SHT_DYNSYM) continue;
    const char* strings = image + section_at(symbols.sh_link).sh_offset;
    for (size_t at = 0; at + sizeof(Elf64_Sym) <= symbols.sh_size; at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      memcpy(&symbol, image + symbols.sh_offset + at, sizeof symbol);
      const std::string name = strings + symbol.st_name;
      const size_t stem = name.size() - std::min(name.size(), kParamsSuffix.size());
      if (symbol.st_shndx != SHN_UNDEF && stem > 0 && name.compare(stem, std::string::npos, kParamsSuffix) == 0)
        names.push_back(name.substr(0, stem));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The loader takes a path it has seen for the object it has loaded, and descriptors are reused: each path is spelt in
// its own way.
static std::string unseen_path(int file) {
  static std::atomic<unsigned> next{0};
  std::string path = "/proc/self/fd";
  for (unsigned rest = ++next; rest != 0; rest >>= 1) path += rest & 1 ? "/./" : "//";
  return path + "/" + std::to_string(file);
}

CUresult load_image(const void* data, std::shared_ptr<Image>* out) {
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const char* image = static_cast<const char*>(data);
  Elf64_Ehdr header;
  if (memcmp(image, ELFMAG, SELFMAG) != 0) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  memcpy(&header, image, sizeof header);
  if (!is_for_this_machine(header)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const size_t bytes = image_bytes(image, header);
  const int file = memfd_create("emulated-gpu-image", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  const bool written = write(file, image, bytes) == ssize_t(bytes);
  auto made = std::make_shared<Image>();
  if (written) made->handle = dlopen(unseen_path(file).c_str(), RTLD_NOW | RTLD_LOCAL);
  close(file);
  if (made->handle == nullptr) {
    fprintf(stderr, "emulated GPU: an image could not be loaded: %s\n", written ? dlerror() : "no memory for it");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  made->kernels = kernel_names(image, header);
  *out = made;
  return CUDA_SUCCESS;
}

CUresult load_file(const char* path, std::vector<char>* out) {
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  out->assign(std::istreambuf_iterator<char>(file), {});
  // Headers of a file too short to be an image are read as zeros.
  out->resize(out->size() + sizeof(Elf64_Ehdr));
  return CUDA_SUCCESS;
}

}  // namespace emulated
