// What CuPy's runtime module names and the stand-in does not do: arrays, textures, surfaces, hints.
// Knows nothing else: each of these refuses.
#include "runtime_core.h"

using emulated_runtime::keep;

#define UNSUPPORTED(name, ...) \
  cudaError_t name(__VA_ARGS__) { return keep(cudaErrorNotSupported); }

extern "C" {

#if CUDART_VERSION >= 13000
UNSUPPORTED(cudaMemPrefetchAsync, const void*, size_t, cudaMemLocation, unsigned, cudaStream_t)
UNSUPPORTED(cudaMemAdvise, const void*, size_t, cudaMemoryAdvise, cudaMemLocation)
#else
UNSUPPORTED(cudaMemPrefetchAsync, const void*, size_t, int, cudaStream_t)
UNSUPPORTED(cudaMemAdvise, const void*, size_t, cudaMemoryAdvise, int)
#endif
UNSUPPORTED(cudaMalloc3DArray, cudaArray_t*, const cudaChannelFormatDesc*, cudaExtent, unsigned)
UNSUPPORTED(cudaMallocArray, cudaArray_t*, const cudaChannelFormatDesc*, size_t, size_t, unsigned)
UNSUPPORTED(cudaFreeArray, cudaArray_t)
UNSUPPORTED(cudaMemcpy2DFromArray, void*, size_t, cudaArray_const_t, size_t, size_t, size_t, size_t, cudaMemcpyKind)
UNSUPPORTED(cudaMemcpy2DFromArrayAsync, void*, size_t, cudaArray_const_t, size_t, size_t, size_t, size_t,
            cudaMemcpyKind, cudaStream_t)
UNSUPPORTED(cudaMemcpy2DToArray, cudaArray_t, size_t, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind)
UNSUPPORTED(cudaMemcpy2DToArrayAsync, cudaArray_t, size_t, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind,
            cudaStream_t)
UNSUPPORTED(cudaMemcpy3D, const cudaMemcpy3DParms*)
UNSUPPORTED(cudaMemcpy3DAsync, const cudaMemcpy3DParms*, cudaStream_t)
UNSUPPORTED(cudaCreateTextureObject, cudaTextureObject_t*, const cudaResourceDesc*, const cudaTextureDesc*,
            const cudaResourceViewDesc*)
UNSUPPORTED(cudaDestroyTextureObject, cudaTextureObject_t)
UNSUPPORTED(cudaGetChannelDesc, cudaChannelFormatDesc*, cudaArray_const_t)
UNSUPPORTED(cudaGetTextureObjectResourceDesc, cudaResourceDesc*, cudaTextureObject_t)
UNSUPPORTED(cudaGetTextureObjectTextureDesc, cudaTextureDesc*, cudaTextureObject_t)
UNSUPPORTED(cudaCreateSurfaceObject, cudaSurfaceObject_t*, const cudaResourceDesc*)
UNSUPPORTED(cudaDestroySurfaceObject, cudaSurfaceObject_t)
UNSUPPORTED(cudaGraphDebugDotPrint, cudaGraph_t, const char*, unsigned)

}  // extern "C"
