// Copies and fills. Between host and device they are carried out; within a device, and from it into
// pinned memory, only small ones are, since what kernels would have computed is not there to be
// moved; nor is what comes back from there, which nobody wrote.
#define _GNU_SOURCE
#include "driver.h"

#include <string.h>
#include <sys/mman.h>

#define MOVED_WITHIN_DEVICE (1u << 20)

static bool is_untouched(const void *at) {
    unsigned char is_resident = 1;
    void *page = (void *)((uintptr_t)at & ~4095ull);
    return is_pinned_memory(at) && !mincore(page, 1, &is_resident) && !(is_resident & 1);
}

static void move(void *to, const void *from, size_t bytes) {
    bool leaves = is_device_memory(from) && (is_device_memory(to) || is_pinned_memory(to));
    if (bytes <= MOVED_WITHIN_DEVICE || !(leaves || is_untouched(from))) memmove(to, from, bytes);
}

static CUresult copy(void *to, const void *from, size_t bytes, CUstream stream) {
    TRY(in_context());
    bool is_later = is_captured(stream);
    bool within = is_device_memory(to) && is_device_memory(from);
    TRY(enqueue(stream, CU_GRAPH_NODE_TYPE_MEMCPY, NULL, transfer_seconds(bytes, within)));
    if (!is_later && bytes) move(to, from, bytes);
    return CUDA_SUCCESS;
}

DRIVER cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    TRY(copy((void *)to, (void *)from, bytes, NULL));
    return cuStreamSynchronize(NULL);
}

DRIVER cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy((void *)to, (void *)from, bytes, stream);
}

// Larger fills with zeros give the pages back, which then read as zeros; with anything else they do
// nothing.
static void fill(void *at, const void *value, size_t width, size_t count) {
    char *byte = at;
    size_t bytes = width * count;
    static const char zeros[8];
    if (bytes <= MOVED_WITHIN_DEVICE) {
        for (size_t i = 0; i < count; i++) memcpy(byte + i * width, value, width);
    } else if (!memcmp(value, zeros, width)) {
        char *begin = (char *)(((uintptr_t)byte + 4095) & ~4095ull);
        char *end = (char *)((uintptr_t)(byte + bytes) & ~4095ull);
        if (begin < end && madvise(begin, end - begin, MADV_REMOVE))  // where it is shared
            madvise(begin, end - begin, MADV_DONTNEED);
    }
}

static CUresult set(CUdeviceptr at, const void *value, size_t width, size_t count,
                    CUstream stream) {
    TRY(in_context());
    bool is_later = is_captured(stream);
    double seconds = transfer_seconds(width * count, true) / 2;  // written, and not read
    TRY(enqueue(stream, CU_GRAPH_NODE_TYPE_MEMSET, NULL, seconds));
    if (!is_later) fill((void *)at, value, width, count);
    return CUDA_SUCCESS;
}

#define SETTERS(bits, type)                                                           \
    DRIVER cuMemsetD##bits(CUdeviceptr at, type value, size_t count) {                \
        return set(at, &value, sizeof value, count, NULL);                            \
    }                                                                                 \
    DRIVER cuMemsetD##bits##Async(CUdeviceptr at, type value, size_t count, CUstream stream) { \
        return set(at, &value, sizeof value, count, stream);                          \
    }
SETTERS(8, unsigned char)
SETTERS(16, unsigned short)
SETTERS(32, unsigned)
