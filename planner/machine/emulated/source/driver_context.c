// Devices, their attributes, and contexts.
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_STACK 16

static struct CUctx_st primary[MAX_GPUS];
static bool is_initialised;
static uint64_t launches[MAX_GPUS];
static CUresult failures[MAX_GPUS];
static __thread CUcontext stack[MAX_STACK];
static __thread int depth;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

int gpu_of(int device) { return machine()->visible[device]; }
const gpu_t *device_gpu(int device) { return &machine()->gpus[gpu_of(device)]; }
CUcontext primary_context(int device) { return &primary[device]; }
int current_device(void) { return depth && stack[depth - 1] ? stack[depth - 1]->device : -1; }

CUresult check_device(int device) {
    if (!is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (device < 0 || device >= machine()->num_visible) return CUDA_ERROR_INVALID_DEVICE;
    return CUDA_SUCCESS;
}

// Errors of kernels are sticky: "the context is left in an inconsistent state, and any further CUDA
// work will return the same error" (CUresult, CUDA_ERROR_ILLEGAL_ADDRESS). What is said when a card
// falls off the bus is not documented; CUDA_ERROR_UNKNOWN is what logs of it show.
CUresult in_context(void) {
    int device = current_device();
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    return is_lost(gpu_of(device)) ? CUDA_ERROR_UNKNOWN : failures[device];
}

void count_launch(int device) {
    const gpu_t *gpu = device_gpu(device);
    uint64_t count = __atomic_add_fetch(&launches[device], 1, __ATOMIC_RELAXED);
    if (count == gpu->illegal_access_after) failures[device] = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (count == gpu->lost_after) lose_gpu(gpu_of(device));
}

DRIVER cuInit(unsigned flags) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < machine()->num_visible && !is_initialised; i++)
        primary[i].device = i;
    is_initialised = true;
    pthread_mutex_unlock(&mutex);
    return machine()->num_visible ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

DRIVER cuDriverGetVersion(int *version) {
    *version = machine()->driver_version;
    return CUDA_SUCCESS;
}

// ---- devices

DRIVER cuDeviceGetCount(int *count) {
    *count = machine()->num_visible;
    return is_initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

DRIVER cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return check_device(ordinal);
}

DRIVER cuDeviceGetName(char *name, int length, CUdevice device) {
    TRY(check_device(device));
    snprintf(name, length, "%s", device_gpu(device)->name);
    return CUDA_SUCCESS;
}

DRIVER cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    TRY(check_device(device));
    device_uuid(gpu_of(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

DRIVER cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    TRY(check_device(device));
    *bytes = device_gpu(device)->memory_bytes;
    return CUDA_SUCCESS;
}

DRIVER cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    TRY(check_device(device));
    snprintf(text, length, "0000:%02X:00.0", gpu_of(device) + 1);
    return CUDA_SUCCESS;
}

DRIVER cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    TRY(check_device(device));
    TRY(check_device(peer));
    *can = device != peer;
    return CUDA_SUCCESS;
}

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
typedef struct {
    int capability, shared_per_sm, shared_per_block, blocks_per_sm;
} limits_t;
static const limits_t per_capability[] = {
    {70, 98304, 98304, 32},    {75, 65536, 65536, 16},    {80, 167936, 166912, 32},
    {86, 102400, 101376, 16},  {87, 167936, 166912, 16},  {89, 102400, 101376, 24},
    {90, 233472, 232448, 32},  {100, 233472, 232448, 32}, {103, 233472, 232448, 32},
    {120, 102400, 101376, 24},
};

static limits_t limits_of(int capability) {
    limits_t found = per_capability[0];
    for (size_t i = 0; i < sizeof per_capability / sizeof *per_capability; i++)
        if (per_capability[i].capability <= capability) found = per_capability[i];
    return found;
}

// What is not listed is 0: not supported.
DRIVER cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    TRY(check_device(device));
    const gpu_t *gpu = device_gpu(device);
    limits_t limits = limits_of(gpu->capability);
    int major = gpu->capability / 10;
    switch (attribute) {
#define IS(name, number) case CU_DEVICE_ATTRIBUTE_##name: *value = (int)(number); break;
        IS(COMPUTE_CAPABILITY_MAJOR, major)
        IS(COMPUTE_CAPABILITY_MINOR, gpu->capability % 10)
        IS(MULTIPROCESSOR_COUNT, gpu->num_sms)
        IS(MAX_THREADS_PER_MULTIPROCESSOR, gpu->threads_per_sm)
        IS(MAX_BLOCKS_PER_MULTIPROCESSOR, limits.blocks_per_sm)
        IS(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, limits.shared_per_sm)
        IS(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, limits.shared_per_block)
        IS(RESERVED_SHARED_MEMORY_PER_BLOCK, major >= 8 ? 1024 : 0)
        IS(MAX_SHARED_MEMORY_PER_BLOCK, 49152)
        IS(MAX_REGISTERS_PER_BLOCK, 65536)
        IS(MAX_REGISTERS_PER_MULTIPROCESSOR, 65536)
        IS(TOTAL_CONSTANT_MEMORY, 65536)
        IS(WARP_SIZE, 32)
        IS(MAX_THREADS_PER_BLOCK, 1024)
        IS(MAX_BLOCK_DIM_X, 1024)
        IS(MAX_BLOCK_DIM_Y, 1024)
        IS(MAX_BLOCK_DIM_Z, 64)
        IS(MAX_GRID_DIM_X, 2147483647)
        IS(MAX_GRID_DIM_Y, 65535)
        IS(MAX_GRID_DIM_Z, 65535)
        IS(MAX_PITCH, 2147483647)
        IS(TEXTURE_ALIGNMENT, 512)
        IS(SURFACE_ALIGNMENT, 512)
        IS(CLOCK_RATE, gpu->clock_mhz * 1000)
        IS(MEMORY_CLOCK_RATE, gpu->memory_clock_mhz * 1000)
        IS(GLOBAL_MEMORY_BUS_WIDTH, gpu->bus_bits)
        IS(L2_CACHE_SIZE, gpu->l2_bytes)
        IS(MAX_PERSISTING_L2_CACHE_SIZE, gpu->l2_bytes / 4 * 3)
        IS(PCI_BUS_ID, gpu_of(device) + 1)
        IS(SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, gpu->capability == 80 || major == 9 ? 2 : 32)
        IS(ASYNC_ENGINE_COUNT, 2)
        IS(GPU_OVERLAP, 1)
        IS(CAN_MAP_HOST_MEMORY, 1)
        IS(CONCURRENT_KERNELS, 1)
        IS(UNIFIED_ADDRESSING, 1)
        IS(STREAM_PRIORITIES_SUPPORTED, 1)
        IS(GLOBAL_L1_CACHE_SUPPORTED, 1)
        IS(LOCAL_L1_CACHE_SUPPORTED, 1)
        IS(MANAGED_MEMORY, 1)
        IS(CONCURRENT_MANAGED_ACCESS, 1)
        IS(COMPUTE_PREEMPTION_SUPPORTED, 1)
        IS(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1)
        IS(HOST_REGISTER_SUPPORTED, 1)
        IS(COOPERATIVE_LAUNCH, 1)
        IS(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, !gpu->lacks_virtual_memory)
        IS(MEMORY_POOLS_SUPPORTED, 1)
        IS(CLUSTER_LAUNCH, major >= 9)
        IS(TENSOR_MAP_ACCESS_SUPPORTED, major >= 9)
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

// ---- contexts

// Once open, a context stays until the process ends, as torch never lets go of one.
DRIVER cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    TRY(check_device(device));
    pthread_mutex_lock(&mutex);
    primary[device].is_open = primary[device].is_open || open_context(gpu_of(device));
    pthread_mutex_unlock(&mutex);
    *context = &primary[device];
    return primary[device].is_open ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    TRY(check_device(device));
    *flags = 0;
    *is_active = primary[device].is_open;
    return CUDA_SUCCESS;
}

DRIVER cuCtxGetCurrent(CUcontext *context) {
    *context = depth ? stack[depth - 1] : NULL;
    return is_initialised ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

DRIVER cuCtxSetCurrent(CUcontext context) {
    if (!is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    if (!context) depth--;
    return CUDA_SUCCESS;
}

DRIVER cuCtxPushCurrent(CUcontext context) {
    if (depth == MAX_STACK) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

DRIVER cuCtxPopCurrent(CUcontext *context) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

// Without in_context(): a device that has failed is still the current one.
DRIVER cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

DRIVER cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    TRY(in_context());
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

DRIVER cuCtxGetLimit(size_t *value, CUlimit limit) {
    TRY(in_context());
    if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = stack[depth - 1]->limits[limit];
    if (!*value && limit == CU_LIMIT_STACK_SIZE) *value = 1024;
    return CUDA_SUCCESS;
}

DRIVER cuCtxSetLimit(CUlimit limit, size_t value) {
    TRY(in_context());
    if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
    stack[depth - 1]->limits[limit] = value;
    return CUDA_SUCCESS;
}

