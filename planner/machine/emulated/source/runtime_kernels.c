// The runtime's kernels: those that programs register as they are loaded, and their launches.
//
// What nvcc emits for a `<<<…>>>` is documented by the toolkit's crt/host_runtime.h, which every
// object file of CUDA code includes: names that begin with two underscores are from there.
#include "runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *code;
    CUlibrary library;  // NULL until the first of its kernels is wanted
} image_t;

typedef struct {
    const void *symbol;  // the host's function or variable that stands for the device's
    const char *name;
    image_t *image;
    CUkernel kernel;
} registered_t;

// Open addressing, half empty at least: torch registers some hundred thousand kernels.
static registered_t *table;
static size_t num_registered, room;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static registered_t *slot(registered_t *slots, size_t count, const void *symbol) {
    size_t i = ((uint64_t)symbol * 0x9e3779b97f4a7c15) >> 20;
    while (slots[i & (count - 1)].symbol && slots[i & (count - 1)].symbol != symbol) i++;
    return &slots[i & (count - 1)];
}

static void grow(void) {
    size_t larger = room ? 2 * room : 1 << 17;
    registered_t *slots = calloc(larger, sizeof *slots);
    for (size_t i = 0; i < room; i++)
        if (table[i].symbol) *slot(slots, larger, table[i].symbol) = table[i];
    free(table);
    table = slots;
    room = larger;
}

static void add(image_t *image, const void *symbol, const char *name) {
    pthread_mutex_lock(&mutex);
    if (2 * num_registered >= room) grow();
    registered_t *place = slot(table, room, symbol);
    num_registered += !place->symbol;
    *place = (registered_t){symbol, name, image};
    pthread_mutex_unlock(&mutex);
}

static registered_t *find(const void *symbol) {
    registered_t *found = room ? slot(table, room, symbol) : NULL;
    return found && found->symbol ? found : NULL;
}

static CUresult load(image_t *image) {
    if (image->library) return CUDA_SUCCESS;
    return cuLibraryLoadData(&image->library, image->code, NULL, NULL, 0, NULL, NULL, 0);
}

// The kernel of a host function; a handle that is a kernel already is itself.
static CUresult kernel_of(CUkernel *kernel, const void *function) {
    CUresult result = enter();
    pthread_mutex_lock(&mutex);
    registered_t *found = find(function);
    *kernel = found ? found->kernel : (CUkernel)function;
    if (!result && !*kernel)
        result = load(found->image)
                     ?: cuLibraryGetKernel(&found->kernel, found->image->library, found->name);
    if (found) *kernel = found->kernel;
    pthread_mutex_unlock(&mutex);
    return result;
}

EXPORT void **__cudaRegisterFatBinary(void *code) {
    image_t *image = malloc(sizeof *image);
    *image = (image_t){code, NULL};
    return (void **)image;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **image) {}
EXPORT void __cudaUnregisterFatBinary(void **image) {}
EXPORT char __cudaInitModule(void **image) { return 1; }

EXPORT void __cudaRegisterFunction(void **image, const char *symbol, char *device_function,
                                   const char *name, int thread_limit, void *thread, void *block,
                                   void *block_size, void *grid_size, int *warp_size) {
    add((image_t *)image, symbol, name);
}

EXPORT void __cudaRegisterVar(void **image, char *symbol, char *address, const char *name,
                              int is_extern, size_t bytes, int is_constant, int is_global) {
    add((image_t *)image, symbol, name);
}

// `<<<grid, block, shared, stream>>>` pushes; the function of that name on the host pops.
typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} configuration_t;
static __thread configuration_t pushed[8];
static __thread int depth;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                            cudaStream_t stream) {
    if (depth == 8) return 1;
    pushed[depth++] = (configuration_t){grid, block, shared_bytes, stream};
    return 0;
}

RUNTIME __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    if (!depth) return cudaErrorMissingConfiguration;
    configuration_t top = pushed[--depth];
    *grid = top.grid;
    *block = top.block;
    *shared_bytes = top.shared_bytes;
    *(cudaStream_t *)stream = top.stream;
    return cudaSuccess;
}

RUNTIME cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                         size_t shared_bytes, cudaStream_t stream) {
    CUkernel kernel;
    CUresult result = kernel_of(&kernel, function);
    if (result) return remember(result);
    result = cuLaunchKernel((CUfunction)kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                            (unsigned)shared_bytes, stream, arguments, NULL);
    // What the driver calls an invalid value is "invalid configuration argument" here.
    return remember(result == CUDA_ERROR_INVALID_VALUE ? (CUresult)cudaErrorInvalidConfiguration
                                                       : result);
}

RUNTIME __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                           size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

RUNTIME cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared_bytes, stream);
}

RUNTIME cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                            void **arguments) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments,
                            config->dynamicSmemBytes, config->stream);
}

// Its caller passes over an error, and launches the handle: one that is the host's function is
// looked up again then, and the launch says what is wrong.
RUNTIME __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    CUresult result = kernel_of((CUkernel *)kernel, function);
    if (result) *kernel = (cudaKernel_t)function;
    return (cudaError_t)result;
}

RUNTIME cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    CUkernel kernel;
    memset(attributes, 0, sizeof *attributes);
    CUresult result = kernel_of(&kernel, function);
    if (result) return remember(result);
#define FIELD(field, attribute)                                                          \
    {                                                                                    \
        int value = 0;                                                                   \
        cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_##attribute, (CUfunction)kernel);   \
        attributes->field = value;                                                       \
    }
    FIELD(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK)
    FIELD(numRegs, NUM_REGS)
    FIELD(ptxVersion, PTX_VERSION)
    FIELD(binaryVersion, BINARY_VERSION)
    FIELD(sharedSizeBytes, SHARED_SIZE_BYTES)
    FIELD(localSizeBytes, LOCAL_SIZE_BYTES)
    FIELD(maxDynamicSharedSizeBytes, MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return cudaSuccess;
}

RUNTIME cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    CUkernel kernel;
    CUresult result = kernel_of(&kernel, function);
    return remember(
        result ?: cuFuncSetAttribute((CUfunction)kernel, (CUfunction_attribute)attribute, value));
}

RUNTIME cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute,
                                        int value, int device) {
    return cudaFuncSetAttribute(kernel, attribute, value);
}

RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function,
                                                               int threads, size_t shared_bytes,
                                                               unsigned flags) {
    CUkernel kernel;
    CUresult result = kernel_of(&kernel, function);
    return remember(result ?: cuOccupancyMaxActiveBlocksPerMultiprocessor(
                                  count, (CUfunction)kernel, threads, shared_bytes));
}

RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads,
                                                      size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads,
                                                                  shared_bytes, 0);
}

RUNTIME cudaLibraryLoadData(cudaLibrary_t *library, const void *code,
                            enum cudaJitOption *jit_options, void **jit_values, unsigned num_jit,
                            enum cudaLibraryOption *options, void **values, unsigned count) {
    return DO_IN_CONTEXT(
        cuLibraryLoadData((CUlibrary *)library, code, NULL, NULL, 0, NULL, NULL, 0));
}

RUNTIME cudaLibraryUnload(cudaLibrary_t library) { return cudaSuccess; }

RUNTIME cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    return DO_IN_CONTEXT(cuLibraryGetKernel((CUkernel *)kernel, (CUlibrary)library, name));
}

RUNTIME cudaGetSymbolAddress(void **address, const void *symbol) {
    registered_t *found = find(symbol);
    if (!found) return cudaErrorInvalidSymbol;
    size_t bytes;
    return DO_IN_CONTEXT(load(found->image)
                             ?: cuLibraryGetGlobal((CUdeviceptr *)address, &bytes,
                                                   found->image->library, found->name));
}

RUNTIME cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                           enum cudaMemcpyKind kind) {
    void *address;
    cudaError_t error = cudaGetSymbolAddress(&address, symbol);
    return error ? error : cudaMemcpy((char *)address + offset, from, bytes, kind);
}
