// Modules, kernels, and their launches: which code a device can run, and within which limits.
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#define VARIABLE_BYTES (1 << 20)  // more than any; their sizes are only in the code

struct variable {
    struct variable *next;
    char *name;
    void *address;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

// ---- images. A fat binary holds code for several architectures: each entry of it has a header, of
// which only what is named here is read (the CUDA Binary Utilities list the same by cuobjdump).

#define FATBIN_WRAPPER_MAGIC 0x466243b1  // __fatBinC_Wrapper_t of the toolkit's fatbinary_section.h
#define FATBIN_MAGIC 0xba55ed50

typedef struct {
    uint32_t magic, version;
    const void *data, *name;
} wrapper_t;
typedef struct {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
} fatbin_t;
typedef struct {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, options;
    uint16_t minor, major;
    uint32_t architecture;
} image_t;
enum { PTX = 1, BINARY = 2 };

// CUDA C++ Programming Guide, "Binary Compatibility": a binary runs on devices of its major
// capability and of its minor one or above. "PTX Compatibility": PTX runs on any later device.
static void choose(module_t *module, const fatbin_t *fatbin, int capability) {
    const char *at = (const char *)fatbin + fatbin->header_bytes, *end = at + fatbin->bytes;
    int binary = 0, ptx = 0;
    while (at < end) {
        const image_t *image = (const image_t *)at;
        int architecture = (int)image->architecture;
        bool runs = architecture <= capability;
        bool same_major = architecture / 10 == capability / 10;
        if (image->kind == BINARY && runs && same_major && architecture > binary)
            binary = architecture;
        if (image->kind == PTX && runs && architecture > ptx) ptx = architecture;
        at += image->header_bytes + image->bytes;
    }
    module->binary = binary ? binary : ptx ? capability : 0;
    module->ptx = binary ? binary : ptx;
}

static module_t *load(const void *code) {
    module_t *module = calloc(1, sizeof *module);
    int device = current_device() < 0 ? 0 : current_device();
    module->binary = module->ptx = device_gpu(device)->capability;  // of PTX, or of one binary
    const wrapper_t *wrapper = code;
    if (code && wrapper->magic == FATBIN_WRAPPER_MAGIC) code = wrapper->data;
    if (code && ((const fatbin_t *)code)->magic == FATBIN_MAGIC)
        choose(module, code, device_gpu(device)->capability);
    return module;
}

static CUfunction function_of(module_t *module, const char *name) {
    CUfunction found;
    pthread_mutex_lock(&mutex);
    for (found = module->functions; found && strcmp(found->name, name);) found = found->next;
    if (!found) {
        found = calloc(1, sizeof *found);
        *found = (struct CUfunc_st){module->functions, module, strdup(name)};
        int *attributes = found->attributes;
        attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
        attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
        attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = module->ptx;
        attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = module->binary;
        attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
        find_result(found);
        module->functions = found;
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

static CUresult address_of(CUdeviceptr *address, size_t *bytes, module_t *module,
                           const char *name) {
    struct variable *found;
    pthread_mutex_lock(&mutex);
    for (found = module->variables; found && strcmp(found->name, name);) found = found->next;
    if (!found) {
        found = calloc(1, sizeof *found);
        *found = (struct variable){module->variables, strdup(name)};
        int device = current_device() < 0 ? 0 : current_device();
        map_device_memory(device, VARIABLE_BYTES, &found->address);
        module->variables = found;
    }
    pthread_mutex_unlock(&mutex);
    if (address) *address = (CUdeviceptr)found->address;
    if (bytes) *bytes = VARIABLE_BYTES;
    return CUDA_SUCCESS;
}

DRIVER cuModuleLoadData(CUmodule *module, const void *image) {
    TRY(in_context());
    *module = (CUmodule)load(image);
    return ((module_t *)*module)->binary ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

DRIVER cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count,
                          CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

DRIVER cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, NULL); }
DRIVER cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

DRIVER cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = function_of((module_t *)module, name);
    return CUDA_SUCCESS;
}

// A library is loaded as a module only when its first kernel is wanted: so lazily, a part of torch
// without code for the device fails when it is used, and not before.
DRIVER cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options,
                         void **jit_values, unsigned num_jit, CUlibraryOption *options,
                         void **values, unsigned count) {
    *library = (CUlibrary)load(code);
    return CUDA_SUCCESS;
}

DRIVER cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    if (!((module_t *)library)->binary) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    *kernel = (CUkernel)function_of((module_t *)library, name);
    return CUDA_SUCCESS;
}

DRIVER cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library,
                          const char *name) {
    return address_of(address, bytes, (module_t *)library, name);
}

// ---- attributes and occupancy

DRIVER cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    if ((unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    *value = function->attributes[attribute];
    return CUDA_SUCCESS;
}

static int device_attribute(CUdevice_attribute attribute) {
    int value = 0;
    cuDeviceGetAttribute(&value, attribute, current_device() < 0 ? 0 : current_device());
    return value;
}

DRIVER cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if ((unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES &&
        value > device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

DRIVER cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel,
                            CUdevice device) {
    return cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

DRIVER cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

// By threads, blocks and shared memory; what registers a kernel takes is only in its code.
DRIVER cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads,
                                                   size_t shared_bytes) {
    int shared = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    int reserved = device_attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
    int warps = (threads + 31) / 32, by_shared = shared / ((int)shared_bytes + reserved + 1);
    *count = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) / (32 * warps);
    int most = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
    if (*count > most) *count = most;
    if (shared_bytes && *count > by_shared) *count = by_shared;
    return CUDA_SUCCESS;
}

DRIVER cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *c) {
    *count = device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) / 2;
    return CUDA_SUCCESS;
}

// ---- launches

typedef struct {
    unsigned x, y, z;
} size3_t;

// "Technical Specifications per Compute Capability", the same for all that torch knows.
static bool can_launch(CUfunction function, size3_t grid, size3_t block, unsigned shared_bytes) {
    bool grid_fits = grid.x && grid.y && grid.z && grid.x <= 2147483647u && grid.y <= 65535 &&
                     grid.z <= 65535;
    bool block_fits = block.x && block.y && block.z && block.z <= 64 &&
                      (uint64_t)block.x * block.y * block.z <= 1024;
    int most = function->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES];
    return grid_fits && block_fits && (int)shared_bytes <= most;
}

// What a kernel costs on the emulated clock: each thread reads and writes 16 bytes, which is what
// torch's vectorised kernels do at the least. An assumption, as all of that clock.
static double kernel_seconds(size3_t grid, size3_t block) {
    const gpu_t *gpu = device_gpu(current_device());
    double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
    return gpu->launch_seconds + (gpu->bandwidth ? 32 * threads / gpu->bandwidth : 0);
}

static CUresult launch(CUfunction function, size3_t grid, size3_t block, unsigned shared_bytes,
                       CUstream stream, void **arguments) {
    TRY(in_context());
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (!can_launch(function, grid, block, shared_bytes)) return CUDA_ERROR_INVALID_VALUE;
    bool is_later = is_captured(stream);
    TRY(enqueue(stream, CU_GRAPH_NODE_TYPE_KERNEL, function, kernel_seconds(grid, block)));
    if (is_later) return CUDA_SUCCESS;
    count_launch(current_device());
    if (function->result && arguments) function->result(function->name, arguments);
    return CUDA_SUCCESS;
}

DRIVER cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                      unsigned by, unsigned bz, unsigned shared_bytes, CUstream stream,
                      void **arguments, void **extra) {
    size3_t grid = {gx, gy, gz}, block = {bx, by, bz};
    return launch(function, grid, block, shared_bytes, stream, arguments);
}

DRIVER cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz,
                                 unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                                 CUstream stream, void **arguments) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, arguments, NULL);
}

DRIVER cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                        void **extra) {
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                          config->blockDimX, config->blockDimY, config->blockDimZ,
                          config->sharedMemBytes, config->hStream, arguments, extra);
}

// On a card the runtime within a library makes the thread's device current at its first call.
__attribute__((weak)) int emulated_enter(void);
static CUresult in_library_context(void) {
    if (current_device() < 0 && emulated_enter) emulated_enter();
    return in_context();
}

// What the calls of the other libraries are: work of so many seconds, beside what a launch costs.
EXPORT int emulated_work(CUstream stream, double seconds) {
    TRY(in_library_context());
    bool is_later = is_captured(stream);
    seconds += device_gpu(current_device())->launch_seconds;
    TRY(enqueue(stream, CU_GRAPH_NODE_TYPE_KERNEL, NULL, seconds));
    if (!is_later) count_launch(current_device());
    return CUDA_SUCCESS;
}

EXPORT int emulated_matmul(CUstream stream, double multiply_adds, enum rate rate) {
    TRY(in_library_context());
    const gpu_t *gpu = device_gpu(current_device());
    double flops = rate == HALF ? gpu->half_flops : rate == TF32 ? gpu->tf32_flops : gpu->fp32_flops;
    return emulated_work(stream, flops ? 2 * multiply_adds / flops : 0);
}

DRIVER cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                              void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                              const cuuint32_t *box, const cuuint32_t *steps,
                              CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                              CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}
