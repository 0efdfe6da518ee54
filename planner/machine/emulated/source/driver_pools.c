// Pools: cudaMallocAsync. A pool keeps what is freed, up to its threshold, which counts at the
// next synchronisation (Stream Ordered Memory Allocator). Its memory is taken to hold no gaps.
#define _GNU_SOURCE
#include "blocks.h"

static struct CUmemPoolHandle_st default_pools[MAX_GPUS];

static bool grow(CUmemoryPool pool, size_t bytes) {
    uint64_t needed = round_up(pool->used + bytes, PAGE_BYTES);
    if (needed > pool->reserved) {
        if (!take_memory(gpu_of(pool->device), needed - pool->reserved)) return false;
        pool->reserved = needed;
    }
    pool->used += bytes;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    return true;
}

static void trim(CUmemoryPool pool, uint64_t kept) {
    uint64_t needed = round_up(pool->used, PAGE_BYTES);
    if (kept < needed) kept = needed;
    if (pool->reserved <= kept) return;
    give_memory(gpu_of(pool->device), pool->reserved - kept);
    pool->reserved = kept;
}

void trim_pools(void) {
    pthread_mutex_lock(&blocks_mutex);
    for (int i = 0; i < machine()->num_visible; i++)
        trim(&default_pools[i], default_pools[i].threshold);
    pthread_mutex_unlock(&blocks_mutex);
}

void free_pooled(const block_t *block) { block->pool->used -= round_up(block->bytes, 512); }

DRIVER cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                               CUstream stream) {
    TRY(in_context());
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&blocks_mutex);
    bool fits = grow(pool, round_up(bytes, 512));
    size_t mapped = round_up(bytes, 4096);
    void *address = fits ? map_next(mapped) : NULL;
    if (address)
        insert_block((block_t){(uintptr_t)address, bytes, mapped, POOLED, pool->device, .pool = pool});
    pthread_mutex_unlock(&blocks_mutex);
    *pointer = (CUdeviceptr)address;
    return address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

DRIVER cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    TRY(check_device(device));
    *pool = &default_pools[device];
    (*pool)->device = device;
    return CUDA_SUCCESS;
}

DRIVER cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    TRY(in_context());
    CUmemoryPool pool;
    TRY(cuDeviceGetDefaultMemPool(&pool, current_device()));
    return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
}

DRIVER cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) { return cuMemFree(pointer); }

DRIVER cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes) {
    pthread_mutex_lock(&blocks_mutex);
    trim(pool, bytes);
    pthread_mutex_unlock(&blocks_mutex);
    return CUDA_SUCCESS;
}

DRIVER cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) pool->threshold = *(uint64_t *)value;
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) pool->used_high = pool->used;
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

DRIVER cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    switch (attribute) {
#define HAS(name, field) \
    case CU_MEMPOOL_ATTR_##name: *(uint64_t *)value = pool->field; break;
        HAS(RELEASE_THRESHOLD, threshold)
        HAS(RESERVED_MEM_CURRENT, reserved)
        HAS(RESERVED_MEM_HIGH, reserved_high)
        HAS(USED_MEM_CURRENT, used)
        HAS(USED_MEM_HIGH, used_high)
        default: *(int *)value = 1;  // whether freed memory is used again, in its three ways
    }
    return CUDA_SUCCESS;
}

// Memory that graphs allocate themselves: none does here.
DRIVER cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    *(uint64_t *)value = 0;
    return check_device(device);
}
DRIVER cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value) {
    return check_device(device);
}
