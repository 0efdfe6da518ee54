// Virtual memory management: addresses and memory apart, as expandable segments use them.
#define _GNU_SOURCE
#include "blocks.h"

#include <stdlib.h>
#include <sys/mman.h>

DRIVER cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                     CUmemAllocationGranularity_flags option) {
    *bytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

DRIVER cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wish,
                           unsigned long long flags) {
    size_t unit = alignment > PAGE_BYTES ? alignment : PAGE_BYTES;
    char *begin = map_anonymous(NULL, bytes + unit, PROT_NONE, 0);
    if (!begin) return CUDA_ERROR_OUT_OF_MEMORY;
    char *aligned = (char *)round_up((uintptr_t)begin, unit);
    if (aligned > begin) munmap(begin, aligned - begin);
    munmap(aligned + bytes, begin + unit - aligned);
    *pointer = (CUdeviceptr)aligned;
    return CUDA_SUCCESS;
}

DRIVER cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    munmap((void *)pointer, bytes);
    return CUDA_SUCCESS;
}

DRIVER cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                   const CUmemAllocationProp *properties, unsigned long long flags) {
    int device = properties->location.id;
    if (!bytes || bytes % PAGE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    TRY(check_device(device));
    if (device_gpu(device)->lacks_virtual_memory) return CUDA_ERROR_NOT_SUPPORTED;
    if (!take_memory(gpu_of(device), bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    physical_t *physical = malloc(sizeof *physical);
    *physical = (physical_t){device, 0, bytes, false};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

// Memory is given back once it is neither held nor mapped.
static void give_back_if_unused(physical_t *physical) {
    if (!physical->is_released || physical->mappings) return;
    give_memory(gpu_of(physical->device), physical->bytes);
    free(physical);
}

DRIVER cuMemRelease(CUmemGenericAllocationHandle handle) {
    physical_t *physical = (physical_t *)(uintptr_t)handle;
    pthread_mutex_lock(&blocks_mutex);
    physical->is_released = true;
    give_back_if_unused(physical);
    pthread_mutex_unlock(&blocks_mutex);
    return CUDA_SUCCESS;
}

DRIVER cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                CUmemGenericAllocationHandle handle, unsigned long long flags) {
    physical_t *physical = (physical_t *)(uintptr_t)handle;
    if (!map_anonymous((void *)pointer, bytes, PROT_READ | PROT_WRITE, MAP_FIXED))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&blocks_mutex);
    physical->mappings++;
    insert_block((block_t){pointer, bytes, bytes, MAPPED, physical->device, .physical = physical});
    pthread_mutex_unlock(&blocks_mutex);
    return CUDA_SUCCESS;
}

DRIVER cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    pthread_mutex_lock(&blocks_mutex);
    for (;;) {
        size_t i = rank_of(pointer + bytes - 1);  // the last block that begins within
        if (!i || blocks[i - 1].begin < pointer || blocks[i - 1].kind != MAPPED) break;
        physical_t *physical = blocks[i - 1].physical;
        erase_block(&blocks[i - 1]);
        physical->mappings--;
        give_back_if_unused(physical);
    }
    pthread_mutex_unlock(&blocks_mutex);
    map_anonymous((void *)pointer, bytes, PROT_NONE, MAP_FIXED);
    return CUDA_SUCCESS;
}

DRIVER cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *description,
                      size_t count) {
    return CUDA_SUCCESS;
}

DRIVER cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    pthread_mutex_lock(&blocks_mutex);
    block_t *block = block_of(address);
    bool is_mapped = block && block->kind == MAPPED && block->physical;
    if (is_mapped) *handle = (CUmemGenericAllocationHandle)(uintptr_t)block->physical;
    pthread_mutex_unlock(&blocks_mutex);
    return is_mapped ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
