// NCCL whose collectives are launches: no bytes move between ranks. What a rank gets of itself is
// copied, where it is small (docs.nvidia.com/deeplearning/nccl/user-guide).
#define __CUDA_RUNTIME_H__  // nccl.h includes these for code that runs on a device
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

#define NCCL EXPORT ncclResult_t
#define COPIED_BYTES (1 << 20)

struct ncclComm {
    int num_ranks, rank;
    bool is_part;  // of another: who else is of its colour is not known here
};

static size_t width(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 1;  // the 8-bit floats, which not every version has
    }
}

static ncclResult_t work(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    if (emulated_work(stream, 0)) return ncclUnhandledCudaError;
    if (to != from && bytes && bytes <= COPIED_BYTES)
        cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes, stream);
    return ncclSuccess;
}

static ncclResult_t create(ncclComm_t *comm, int num_ranks, int rank) {
    *comm = malloc(sizeof **comm);
    **comm = (struct ncclComm){num_ranks, rank, false};
    return ncclSuccess;
}

NCCL ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
NCCL ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    return ncclSuccess;
}
NCCL ncclCommInitRank(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank) {
    return create(comm, num_ranks, rank);
}
NCCL ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank,
                            ncclConfig_t *config) {
    return create(comm, num_ranks, rank);
}
NCCL ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    for (int rank = 0; rank < count; rank++) create(&comms[rank], count, rank);
    return ncclSuccess;
}
// torch's key is the rank in the part.
NCCL ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    create(part, comm->num_ranks, key);
    (*part)->is_part = true;
    return ncclSuccess;
}
NCCL ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
NCCL ncclCommDestroy(ncclComm_t comm) {
    free(comm);
    return ncclSuccess;
}
NCCL ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
NCCL ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
NCCL ncclCommCount(const ncclComm_t comm, int *count) {
    *count = comm->num_ranks;
    return ncclSuccess;
}
NCCL ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
NCCL ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) {
    *handle = buffer;
    return ncclSuccess;
}
EXPORT const char *ncclGetErrorString(ncclResult_t error) { return error ? "failure" : "no error"; }
EXPORT const char *ncclGetLastError(ncclComm_t comm) { return ""; }

NCCL ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                   ncclComm_t comm, cudaStream_t stream) {
    return work(to, from, count * width(type), stream);
}
NCCL ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                int root, ncclComm_t comm, cudaStream_t stream) {
    return work(to, from, comm->rank == root ? count * width(type) : 0, stream);
}
NCCL ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                       ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width(type);
    return work(to, (const char *)from + comm->rank * bytes, bytes, stream);
}
// Every part is taken to be like this rank's own, as at the start of a training all are; where their
// number is not known only that is copied.
NCCL ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                   cudaStream_t stream) {
    size_t bytes = count * width(type);
    if (work(to, to, 0, stream)) return ncclUnhandledCudaError;
    for (int rank = 0; rank < comm->num_ranks && bytes <= COPIED_BYTES; rank++) {
        char *part = (char *)to + rank * bytes;
        if (part != from && (!comm->is_part || rank == comm->rank))
            cuMemcpyAsync((CUdeviceptr)part, (CUdeviceptr)from, bytes, stream);
    }
    return ncclSuccess;
}
NCCL ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                  cudaStream_t stream) {
    return work(to, from, (comm->is_part ? 1 : comm->num_ranks) * count * width(type), stream);
}
// torch gathers into tensors apart by a group of broadcasts, one of each rank. Those of the others
// receive, when the group ends, what this rank sends in it: as in ncclAllGather.
static __thread struct {
    int depth, count;
    const void *own;
    struct {
        void *to;
        size_t bytes;
        cudaStream_t stream;
    } received[256];
} group;

NCCL ncclGroupStart(void) {
    if (!group.depth++) group.own = NULL, group.count = 0;
    return ncclSuccess;
}

NCCL ncclGroupEnd(void) {
    if (--group.depth || !group.own) return ncclSuccess;
    for (int i = 0; i < group.count; i++)
        cuMemcpyAsync((CUdeviceptr)group.received[i].to, (CUdeviceptr)group.own,
                      group.received[i].bytes, group.received[i].stream);
    return ncclSuccess;
}

NCCL ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                   ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width(type);
    if (root == comm->rank) {
        group.own = from;
        return work(to, from, bytes, stream);
    }
    if (group.depth && group.count < 256 && bytes <= COPIED_BYTES) {
        int i = group.count++;
        group.received[i].to = to;
        group.received[i].bytes = bytes;
        group.received[i].stream = stream;
    }
    return work(to, to, 0, stream);
}
NCCL ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
               cudaStream_t stream) {
    return work(buffer, buffer, 0, stream);
}
NCCL ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
    return work(NULL, from, 0, stream);
}
NCCL ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
    return work(to, NULL, 0, stream);
}
