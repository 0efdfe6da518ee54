// The runtime's memory.
#include "runtime.h"

#include <string.h>

RUNTIME cudaMalloc(void **pointer, size_t bytes) {
    *pointer = NULL;
    return DO_IN_CONTEXT(bytes ? cuMemAlloc((CUdeviceptr *)pointer, bytes) : CUDA_SUCCESS);
}

RUNTIME cudaMallocManaged(void **pointer, size_t bytes, unsigned flags) {
    return DO_IN_CONTEXT(cuMemAllocManaged((CUdeviceptr *)pointer, bytes, flags));
}

RUNTIME cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    *pointer = NULL;
    return DO_IN_CONTEXT(bytes ? cuMemAllocAsync((CUdeviceptr *)pointer, bytes, stream)
                               : CUDA_SUCCESS);
}

RUNTIME cudaFree(void *pointer) { return DO_IN_CONTEXT(cuMemFree((CUdeviceptr)pointer)); }

RUNTIME cudaFreeAsync(void *pointer, cudaStream_t stream) {
    return DO_IN_CONTEXT(cuMemFreeAsync((CUdeviceptr)pointer, stream));
}

RUNTIME cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    return DO_IN_CONTEXT(cuMemHostAlloc(pointer, bytes, flags));
}

RUNTIME cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
RUNTIME cudaFreeHost(void *pointer) { return DO_IN_CONTEXT(cuMemFreeHost(pointer)); }

RUNTIME cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    return DO_IN_CONTEXT(cuMemHostRegister(pointer, bytes, flags));
}

RUNTIME cudaHostUnregister(void *pointer) { return DO_IN_CONTEXT(cuMemHostUnregister(pointer)); }

RUNTIME cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    return DO_IN_CONTEXT(cuMemGetInfo(free_bytes, total_bytes));
}

RUNTIME cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return DO_IN_CONTEXT(cuMemcpy((CUdeviceptr)to, (CUdeviceptr)from, bytes));
}

RUNTIME cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                        cudaStream_t stream) {
    return DO_IN_CONTEXT(cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes, stream));
}

RUNTIME cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                            size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}

RUNTIME cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                          size_t width, size_t height, enum cudaMemcpyKind kind,
                          cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        cudaError_t error = cudaMemcpyAsync((char *)to + row * to_pitch,
                                            (const char *)from + row * from_pitch, width, kind,
                                            stream);
        if (error) return error;
    }
    return cudaSuccess;
}

RUNTIME cudaMemset(void *at, int value, size_t bytes) {
    return DO_IN_CONTEXT(cuMemsetD8((CUdeviceptr)at, (unsigned char)value, bytes));
}

RUNTIME cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    return DO_IN_CONTEXT(cuMemsetD8Async((CUdeviceptr)at, (unsigned char)value, bytes, stream));
}

// Of memory that CUDA does not know, the runtime says so where the driver gives an error.
RUNTIME cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    unsigned type = 0, is_managed = 0;
    int device = -1;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                    CU_POINTER_ATTRIBUTE_IS_MANAGED};
    void *values[] = {&type, &device, &is_managed};
    cudaError_t error =
        DO_IN_CONTEXT(cuPointerGetAttributes(3, wanted, values, (CUdeviceptr)pointer));
    bool on_device = type == CU_MEMORYTYPE_DEVICE;
    attributes->type = !type        ? cudaMemoryTypeUnregistered
                       : is_managed ? cudaMemoryTypeManaged
                       : on_device  ? cudaMemoryTypeDevice
                                    : cudaMemoryTypeHost;
    attributes->device = type ? device : -1;
    attributes->devicePointer = type ? (void *)pointer : NULL;
    attributes->hostPointer = on_device && !is_managed ? NULL : (void *)pointer;
    return error;
}

RUNTIME cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    return DO_IN_CONTEXT(cuIpcGetMemHandle((CUipcMemHandle *)handle, (CUdeviceptr)pointer));
}

RUNTIME cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    CUipcMemHandle same;
    memcpy(&same, &handle, sizeof same);
    return DO_IN_CONTEXT(cuIpcOpenMemHandle((CUdeviceptr *)pointer, same, flags));
}

RUNTIME cudaIpcCloseMemHandle(void *pointer) {
    return DO_IN_CONTEXT(cuIpcCloseMemHandle((CUdeviceptr)pointer));
}

RUNTIME cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    return DO_IN_CONTEXT(cuIpcGetEventHandle((CUipcEventHandle *)handle, event));
}

RUNTIME cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    CUipcEventHandle same;
    memcpy(&same, &handle, sizeof same);
    return DO_IN_CONTEXT(cuIpcOpenEventHandle(event, same));
}

RUNTIME cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    return DO(cuDeviceGetDefaultMemPool(pool, device));
}

RUNTIME cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    return remember(cuMemPoolGetAttribute(pool, (CUmemPool_attribute)attribute, value));
}

RUNTIME cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    return remember(cuMemPoolSetAttribute(pool, (CUmemPool_attribute)attribute, value));
}

RUNTIME cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access,
                             size_t count) {
    return cudaSuccess;
}

RUNTIME cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    return remember(cuMemPoolTrimTo(pool, bytes));
}

RUNTIME cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute,
                                       void *value) {
    return DO(cuDeviceGetGraphMemAttribute(device, (CUgraphMem_attribute)attribute, value));
}

RUNTIME cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute,
                                       void *value) {
    return DO(cuDeviceSetGraphMemAttribute(device, (CUgraphMem_attribute)attribute, value));
}
