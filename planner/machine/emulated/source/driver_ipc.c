// Memory and events of one process in another, by handles that travel between them.
//
// Shared memory is a file beside the table of who holds memory: the owner's block moves into it, page
// by page that was written, when its handle is first asked for. It counts as the owner's alone.
#define _GNU_SOURCE
#include "blocks.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {  // within the 64 bytes of a handle
    pid_t pid;
    int device;
    uint64_t id, offset, bytes;
} shared_t;

static void name_file(char path[300], pid_t pid, uint64_t id) {
    snprintf(path, 300, "%s-%d-%llu", machine()->table, pid, (unsigned long long)id);
}

static bool map_file(int file, void *at, size_t bytes) {
    int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
    return mmap(at, bytes, protection, flags, file, 0) != MAP_FAILED;
}

static bool move_into(int file, const block_t *block) {
    static const char zeros[4096];
    const char *from = (const char *)block->begin;
    if (ftruncate(file, block->mapped_bytes)) return false;
    for (size_t at = 0; at < block->mapped_bytes; at += sizeof zeros)
        if (memcmp(from + at, zeros, sizeof zeros) &&
            pwrite(file, from + at, sizeof zeros, at) != sizeof zeros)
            return false;
    return map_file(file, (void *)block->begin, block->mapped_bytes);
}

static CUresult share(block_t *block, CUdeviceptr pointer, CUipcMemHandle *handle) {
    if (!block || block->kind != DEVICE) return CUDA_ERROR_INVALID_VALUE;
    char path[300];
    name_file(path, getpid(), block->id);
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0) {
        bool is_moved = move_into(file, block);
        close(file);
        if (!is_moved) {
            unlink(path);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        block->is_shared = true;
    } else if (!block->is_shared) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    shared_t shared = {getpid(), gpu_of(block->device), block->id, pointer - block->begin,
                       block->mapped_bytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &shared, sizeof shared);
    return CUDA_SUCCESS;
}

// The pages stay where another process has opened them.
void stop_sharing(const block_t *block) {
    char path[300];
    name_file(path, getpid(), block->id);
    if (block->is_shared) unlink(path);
}

DRIVER cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    TRY(in_context());
    pthread_mutex_lock(&blocks_mutex);
    CUresult result = share(block_of((void *)pointer), pointer, handle);
    pthread_mutex_unlock(&blocks_mutex);
    return result;
}

DRIVER cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags) {
    TRY(in_context());
    shared_t shared;
    memcpy(&shared, &handle, sizeof shared);
    if (gpu_of(current_device()) != shared.device) return CUDA_ERROR_INVALID_VALUE;
    char path[300];
    name_file(path, shared.pid, shared.id);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return CUDA_ERROR_INVALID_VALUE;  // of a process that is gone, or freed since
    pthread_mutex_lock(&blocks_mutex);
    char *at = map_next(shared.bytes);
    bool is_open = at && map_file(file, at, shared.bytes);
    if (is_open)
        insert_block((block_t){(uintptr_t)at, shared.bytes, shared.bytes, MAPPED, current_device()});
    pthread_mutex_unlock(&blocks_mutex);
    close(file);
    *pointer = (CUdeviceptr)(at + shared.offset);
    return is_open ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

DRIVER cuIpcCloseMemHandle(CUdeviceptr pointer) {
    pthread_mutex_lock(&blocks_mutex);
    block_t *block = block_of((void *)pointer);
    bool is_ours = block && block->kind == MAPPED;
    if (is_ours) {
        munmap((void *)block->begin, block->mapped_bytes);
        erase_block(block);
    }
    pthread_mutex_unlock(&blocks_mutex);
    return is_ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Work is over as soon as it is asked for: of an event only its instant is of use elsewhere.
DRIVER cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &event->at, sizeof event->at);
    return in_context();
}

DRIVER cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle) {
    TRY(cuEventCreate(event, CU_EVENT_DISABLE_TIMING));
    memcpy(&(*event)->at, &handle, sizeof (*event)->at);
    (*event)->is_recorded = true;
    return CUDA_SUCCESS;
}
