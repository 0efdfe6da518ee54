// The runtime's errors and devices.
#include "runtime.h"

#include <pthread.h>
#include <string.h>

static __thread cudaError_t last;
static __thread int chosen;          // by cudaSetDevice
static __thread int entered = -1;    // the device whose context this thread has made current
static CUcontext contexts[MAX_GPUS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int initialised = -1;

// ---- errors: the runtime's have the driver's numbers (driver_types.h)

static const struct {
    cudaError_t error;
    const char *name;
} names[] = {
#define NAMED(name) {name, #name},
    NAMED(cudaSuccess) NAMED(cudaErrorInvalidValue) NAMED(cudaErrorMemoryAllocation)
    NAMED(cudaErrorInitializationError) NAMED(cudaErrorInvalidConfiguration)
    NAMED(cudaErrorInvalidSymbol) NAMED(cudaErrorInsufficientDriver)
    NAMED(cudaErrorInvalidDeviceFunction) NAMED(cudaErrorNoDevice) NAMED(cudaErrorInvalidDevice)
    NAMED(cudaErrorDeviceUninitialized) NAMED(cudaErrorNoKernelImageForDevice)
    NAMED(cudaErrorInvalidResourceHandle) NAMED(cudaErrorIllegalState)
    NAMED(cudaErrorSymbolNotFound) NAMED(cudaErrorNotReady) NAMED(cudaErrorIllegalAddress)
    NAMED(cudaErrorHostMemoryAlreadyRegistered) NAMED(cudaErrorNotSupported)
    NAMED(cudaErrorStreamCaptureUnsupported) NAMED(cudaErrorStreamCaptureInvalidated)
    NAMED(cudaErrorCapturedEvent) NAMED(cudaErrorUnknown)
};

cudaError_t remember(CUresult result) {
    if (result) last = (cudaError_t)result;
    return (cudaError_t)result;
}

RUNTIME cudaGetLastError(void) {
    cudaError_t error = last;
    // "If the error is sticky, it is returned until the process ends": the next call says it again.
    last = cudaSuccess;
    return error;
}

RUNTIME cudaPeekAtLastError(void) { return last; }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].error == error) return names[i].name;
    return "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    const char *text;
    if (error == cudaErrorInvalidConfiguration) return "invalid configuration argument";
    if (error == cudaErrorInvalidDeviceFunction) return "invalid device function";
    return cuGetErrorString((CUresult)error, &text) ? "unrecognized error code" : text;
}

// ---- devices

CUresult initialise(void) {
    pthread_mutex_lock(&mutex);
    if (initialised < 0) initialised = cuInit(0);
    pthread_mutex_unlock(&mutex);
    return initialised;
}

// A context that somebody else made current is used as it is.
CUresult enter(void) {
    CUresult result = initialise();
    if (result) return result;
    CUcontext current;
    cuCtxGetCurrent(&current);
    if (current && entered == chosen) return CUDA_SUCCESS;
    if (current && entered < 0) {
        cuCtxGetDevice(&chosen);
        entered = chosen;
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&mutex);
    if (!contexts[chosen]) {
        result = cuDevicePrimaryCtxRetain(&contexts[chosen], chosen);
        if (result) contexts[chosen] = NULL;
    }
    pthread_mutex_unlock(&mutex);
    if (result) return result;
    entered = chosen;
    return cuCtxSetCurrent(contexts[chosen]);
}

// For the libraries' own calls of the driver.
EXPORT int emulated_enter(void) { return enter(); }

RUNTIME cudaDriverGetVersion(int *version) { return remember(cuDriverGetVersion(version)); }

RUNTIME cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

RUNTIME cudaGetDeviceCount(int *count) {
    *count = 0;
    return DO(cuDeviceGetCount(count));
}

RUNTIME cudaGetDevice(int *device) {
    *device = chosen;
    return DO(CUDA_SUCCESS);
}

// From CUDA 12 on, this makes the device's context.
RUNTIME cudaSetDevice(int device) {
    CUdevice found;
    cudaError_t error = DO(cuDeviceGet(&found, device));
    if (error) return error;
    chosen = device;
    return DO_IN_CONTEXT(CUDA_SUCCESS);
}

RUNTIME cudaDeviceSynchronize(void) { return DO_IN_CONTEXT(cuCtxSynchronize()); }

RUNTIME cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return DO(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device));
}

RUNTIME cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    return DO(cuDeviceCanAccessPeer(can, device, peer));
}

RUNTIME cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    return DO_IN_CONTEXT(CUDA_SUCCESS);
}

RUNTIME cudaDeviceGetPCIBusId(char *text, int length, int device) {
    return DO(cuDeviceGetPCIBusId(text, length, device));
}

RUNTIME cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return DO_IN_CONTEXT(cuCtxGetStreamPriorityRange(least, greatest));
}

RUNTIME cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    CUresult result =
        initialise() ?: cuDeviceGetName(properties->name, sizeof properties->name, device);
    if (result) return remember(result);
    cuDeviceGetUuid((CUuuid *)&properties->uuid, device);
    cuDeviceTotalMem(&properties->totalGlobalMem, device);
#define FIELD(field, attribute)                                                   \
    {                                                                             \
        int value = 0;                                                            \
        cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_##attribute, device);    \
        properties->field = value;                                                \
    }
    FIELD(major, COMPUTE_CAPABILITY_MAJOR)
    FIELD(minor, COMPUTE_CAPABILITY_MINOR)
    FIELD(multiProcessorCount, MULTIPROCESSOR_COUNT)
    FIELD(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR)
    FIELD(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR)
    FIELD(sharedMemPerMultiprocessor, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
    FIELD(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK)
    FIELD(sharedMemPerBlockOptin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    FIELD(reservedSharedMemPerBlock, RESERVED_SHARED_MEMORY_PER_BLOCK)
    FIELD(regsPerBlock, MAX_REGISTERS_PER_BLOCK)
    FIELD(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR)
    FIELD(totalConstMem, TOTAL_CONSTANT_MEMORY)
    FIELD(warpSize, WARP_SIZE)
    FIELD(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK)
    FIELD(maxThreadsDim[0], MAX_BLOCK_DIM_X)
    FIELD(maxThreadsDim[1], MAX_BLOCK_DIM_Y)
    FIELD(maxThreadsDim[2], MAX_BLOCK_DIM_Z)
    FIELD(maxGridSize[0], MAX_GRID_DIM_X)
    FIELD(maxGridSize[1], MAX_GRID_DIM_Y)
    FIELD(maxGridSize[2], MAX_GRID_DIM_Z)
    FIELD(memPitch, MAX_PITCH)
    FIELD(textureAlignment, TEXTURE_ALIGNMENT)
    FIELD(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH)
    FIELD(l2CacheSize, L2_CACHE_SIZE)
    FIELD(persistingL2CacheMaxSize, MAX_PERSISTING_L2_CACHE_SIZE)
    FIELD(pciBusID, PCI_BUS_ID)
    FIELD(asyncEngineCount, ASYNC_ENGINE_COUNT)
    FIELD(canMapHostMemory, CAN_MAP_HOST_MEMORY)
    FIELD(concurrentKernels, CONCURRENT_KERNELS)
    FIELD(unifiedAddressing, UNIFIED_ADDRESSING)
    FIELD(streamPrioritiesSupported, STREAM_PRIORITIES_SUPPORTED)
    FIELD(managedMemory, MANAGED_MEMORY)
    FIELD(concurrentManagedAccess, CONCURRENT_MANAGED_ACCESS)
    FIELD(cooperativeLaunch, COOPERATIVE_LAUNCH)
    FIELD(memoryPoolsSupported, MEMORY_POOLS_SUPPORTED)
    FIELD(clusterLaunch, CLUSTER_LAUNCH)
    return cudaSuccess;
}

RUNTIME cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                         unsigned long long flags,
                                         enum cudaDriverEntryPointQueryResult *status) {
    CUdriverProcAddressQueryResult found;
    CUresult result = cuGetProcAddress(name, function, (int)version, flags, &found);
    if (status) *status = (enum cudaDriverEntryPointQueryResult)found;
    return result == CUDA_ERROR_NOT_FOUND ? cudaSuccess : remember(result);
}

RUNTIME cudaProfilerStart(void) { return cudaSuccess; }
RUNTIME cudaProfilerStop(void) { return cudaSuccess; }
