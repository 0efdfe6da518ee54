// Memory: what is allocated where, and what an address is.
//
// Device memory is address space of the host, without swap reserved for it: it takes host memory
// only where something is written. What each allocation counts for on the device is kept apart.
#define _GNU_SOURCE
#include "blocks.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

block_t *blocks;
pthread_mutex_t blocks_mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t num_blocks, room;
static uint64_t small_bytes[MAX_GPUS];  // of the blocks that share pages

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t rank_of(uintptr_t address) {
    size_t low = 0, high = num_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].begin <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

block_t *block_of(const void *address) {
    uintptr_t at = (uintptr_t)address;
    size_t i = rank_of(at);
    return i && at < blocks[i - 1].begin + blocks[i - 1].bytes ? &blocks[i - 1] : NULL;
}

static block_t *block_at(const void *address) {
    block_t *block = block_of(address);
    return block && block->begin == (uintptr_t)address ? block : NULL;
}

void insert_block(block_t block) {
    if (num_blocks == room) {
        room = room ? 2 * room : 1024;
        blocks = realloc(blocks, room * sizeof *blocks);
    }
    size_t i = rank_of(block.begin);
    memmove(blocks + i + 1, blocks + i, (num_blocks - i) * sizeof *blocks);
    block.id = next_id();
    blocks[i] = block;
    num_blocks++;
}

void erase_block(block_t *block) {
    size_t i = block - blocks;
    memmove(block, block + 1, (--num_blocks - i) * sizeof *blocks);
}

static bool is_on_device(const block_t *block) { return block && block->kind < HOST; }

bool is_device_memory(const void *address) {
    pthread_mutex_lock(&blocks_mutex);
    bool is = is_on_device(block_of(address));
    pthread_mutex_unlock(&blocks_mutex);
    return is;
}

bool is_pinned_memory(const void *address) {
    pthread_mutex_lock(&blocks_mutex);
    block_t *block = block_of(address);
    bool is = block && block->kind == HOST;
    pthread_mutex_unlock(&blocks_mutex);
    return is;
}

void *map_anonymous(void *wish, size_t bytes, int protection, int flags) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *address = mmap(wish, bytes, protection, flags, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

// Addresses ascend, as the driver's do: an allocator that breaks ties by address depends on it.
void *map_next(size_t bytes) {
    static uintptr_t next = 0x200000000000;
    void *address = map_anonymous((void *)next, bytes, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
    if (!address) return map_anonymous(NULL, bytes, PROT_READ | PROT_WRITE, 0);
    next = (uintptr_t)address + round_up(bytes, PAGE_BYTES);
    madvise(address, bytes, MADV_NOHUGEPAGE);
    return address;
}

// ---- allocations. Those below 1 MiB share pages of 2 MiB; the others have pages of their own.

static size_t page_bytes(size_t bytes) {
    return bytes < PAGE_BYTES / 2 ? 0 : round_up(bytes, PAGE_BYTES);
}

static bool resize_small(int device, int64_t change) {
    uint64_t before = round_up(small_bytes[device], PAGE_BYTES);
    uint64_t after = round_up(small_bytes[device] + change, PAGE_BYTES);
    if (after > before && !take_memory(gpu_of(device), after - before)) return false;
    if (after < before) give_memory(gpu_of(device), before - after);
    small_bytes[device] += change;
    return true;
}

static bool resize(int device, size_t bytes, bool grows) {
    size_t pages = page_bytes(bytes), small = round_up(bytes, 512);
    if (!pages) return resize_small(device, grows ? (int64_t)small : -(int64_t)small);
    if (grows) return take_memory(gpu_of(device), pages);
    give_memory(gpu_of(device), pages);
    return true;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, kind_t kind) {
    TRY(in_context());
    if (!bytes) return CUDA_ERROR_INVALID_VALUE;
    int device = current_device();
    pthread_mutex_lock(&blocks_mutex);
    bool fits = resize(device, bytes, true);
    size_t mapped = page_bytes(bytes) ? page_bytes(bytes) : round_up(bytes, 4096);
    void *address = fits ? map_next(mapped) : NULL;
    if (fits && !address) resize(device, bytes, false);
    if (address)
        insert_block((block_t){(uintptr_t)address, bytes, mapped, kind, device});
    pthread_mutex_unlock(&blocks_mutex);
    *pointer = (CUdeviceptr)address;
    return address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult free_device(CUdeviceptr pointer) {
    if (!pointer) return CUDA_SUCCESS;
    TRY(in_context());
    pthread_mutex_lock(&blocks_mutex);
    block_t *block = block_at((void *)pointer);
    bool is_ours = block && (block->kind == DEVICE || block->kind == MANAGED ||
                             block->kind == POOLED);
    if (is_ours) {
        munmap((void *)pointer, block->mapped_bytes);
        stop_sharing(block);
        if (block->kind == POOLED) free_pooled(block);
        else resize(block->device, block->bytes, false);
        erase_block(block);
    }
    pthread_mutex_unlock(&blocks_mutex);
    return is_ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

DRIVER cuMemAlloc(CUdeviceptr *pointer, size_t bytes) { return allocate(pointer, bytes, DEVICE); }
DRIVER cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags) {
    return allocate(pointer, bytes, MANAGED);
}
DRIVER cuMemFree(CUdeviceptr pointer) { return free_device(pointer); }

DRIVER cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    TRY(in_context());
    int device = current_device();
    *free_bytes = free_memory(gpu_of(device));
    *total_bytes = device_gpu(device)->memory_bytes;
    return CUDA_SUCCESS;
}

DRIVER cuMemGetAddressRange(CUdeviceptr *begin, size_t *bytes, CUdeviceptr pointer) {
    pthread_mutex_lock(&blocks_mutex);
    block_t *block = block_of((void *)pointer);
    if (block && begin) *begin = block->begin;
    if (block && bytes) *bytes = block->bytes;
    pthread_mutex_unlock(&blocks_mutex);
    return block ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Memory of the driver's own: the variables of modules, which take none of the device's here.
CUresult map_device_memory(int device, size_t bytes, void **address) {
    *address = map_anonymous(NULL, bytes, PROT_READ | PROT_WRITE, 0);
    if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&blocks_mutex);
    insert_block((block_t){(uintptr_t)*address, bytes, bytes, MAPPED, device});
    pthread_mutex_unlock(&blocks_mutex);
    return CUDA_SUCCESS;
}

// ---- host memory

DRIVER cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    TRY(in_context());
    size_t mapped = round_up(bytes ? bytes : 1, 4096);
    *pointer = map_anonymous(NULL, mapped, PROT_READ | PROT_WRITE, 0);
    if (!*pointer) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&blocks_mutex);
    insert_block((block_t){(uintptr_t)*pointer, mapped, mapped, HOST, current_device()});
    pthread_mutex_unlock(&blocks_mutex);
    return CUDA_SUCCESS;
}

static CUresult forget_host(void *pointer, kind_t kind) {
    pthread_mutex_lock(&blocks_mutex);
    block_t *block = block_at(pointer);
    bool is_ours = block && block->kind == kind;
    if (is_ours) {
        if (kind == HOST) munmap(pointer, block->mapped_bytes);
        erase_block(block);
    }
    pthread_mutex_unlock(&blocks_mutex);
    return is_ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

DRIVER cuMemFreeHost(void *pointer) { return pointer ? forget_host(pointer, HOST) : CUDA_SUCCESS; }

DRIVER cuMemHostRegister(void *pointer, size_t bytes, unsigned flags) {
    TRY(in_context());
    pthread_mutex_lock(&blocks_mutex);
    bool is_new = !block_at(pointer);
    if (is_new) insert_block((block_t){(uintptr_t)pointer, bytes, bytes, REGISTERED, current_device()});
    pthread_mutex_unlock(&blocks_mutex);
    return is_new ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

DRIVER cuMemHostUnregister(void *pointer) { return forget_host(pointer, REGISTERED); }

// ---- what an address is

static CUresult attribute_of(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    block_t *block = block_of((void *)pointer);
    bool on_device = is_on_device(block);
    switch (attribute) {
#define GIVES(name, type, given) \
    case CU_POINTER_ATTRIBUTE_##name: *(type *)value = (type)(given); break;
        GIVES(CONTEXT, CUcontext, block ? primary_context(block->device) : NULL)
        GIVES(MEMORY_TYPE, unsigned,
              !block ? 0 : on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST)
        GIVES(DEVICE_POINTER, CUdeviceptr, block ? pointer : 0)
        GIVES(HOST_POINTER, void *,
              block && (!on_device || block->kind == MANAGED) ? pointer : 0)
        GIVES(BUFFER_ID, uint64_t, block ? block->id : 0)
        GIVES(IS_MANAGED, unsigned, block && block->kind == MANAGED)
        GIVES(DEVICE_ORDINAL, int, block ? block->device : -2)
        GIVES(IS_LEGACY_CUDA_IPC_CAPABLE, unsigned, block && block->kind == DEVICE)
        GIVES(RANGE_START_ADDR, CUdeviceptr, block ? block->begin : 0)
        GIVES(RANGE_SIZE, size_t, block ? block->bytes : 0)
        GIVES(MAPPED, unsigned, block != NULL)
        default: memset(value, 0, sizeof(int));
    }
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

DRIVER cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    pthread_mutex_lock(&blocks_mutex);
    CUresult result = attribute_of(value, attribute, pointer);
    pthread_mutex_unlock(&blocks_mutex);
    return result;
}

// Of an address that CUDA does not know, this one gives zeros and no error.
DRIVER cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values,
                              CUdeviceptr pointer) {
    pthread_mutex_lock(&blocks_mutex);
    for (unsigned i = 0; i < count; i++) attribute_of(values[i], attributes[i], pointer);
    pthread_mutex_unlock(&blocks_mutex);
    return CUDA_SUCCESS;
}
