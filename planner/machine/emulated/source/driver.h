// What the files of the emulated driver share. Public names are those of the CUDA Driver API, whose
// reference says what each of them does (docs.nvidia.com/cuda/cuda-driver-api).
#pragma once
#include <cuda.h>
#include <pthread.h>

#include "machine.h"

#define DRIVER EXPORT CUresult
#define PAGE_BYTES (2ull << 20)  // what device memory is mapped in: cuMemGetAllocationGranularity
#define TRY(call) do { CUresult tried = (call); if (tried) return tried; } while (0)

typedef struct {
    uint64_t id;
    CUgraph graph;
    bool is_running, is_broken;
} capture_t;

struct CUctx_st {
    int device;  // counts those that are visible
    bool is_open;
    size_t limits[CU_LIMIT_MAX];
};
struct CUstream_st {
    CUcontext context;
    int priority;
    double ready;  // seconds of the emulated clock at which its work is done
    capture_t *capture;
    CUgraphNode last;
};
struct CUevent_st {
    unsigned flags;
    bool is_recorded;
    double at;
    capture_t *capture;
};
struct CUgraphNode_st {
    CUgraphNodeType type;
    CUfunction function;
    double seconds;
    CUgraphNode next;
};
struct CUgraph_st {
    size_t count;
    double seconds;
    CUgraphNode first, last;
};

// One image of code, as a CUmodule and as a CUlibrary.
typedef struct {
    int binary, ptx;  // the architectures of what was chosen for the device; 0 where nothing fits
    CUfunction functions;
    struct variable *variables;
} module_t;
struct CUfunc_st {  // as a CUkernel, too
    CUfunction next;
    module_t *module;
    char *name;
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
    void (*result)(const char *name, void **arguments);
};

// driver_context.c
CUresult check_device(int device);
int gpu_of(int device);
const gpu_t *device_gpu(int device);
int current_device(void);     // -1 where no context is current
CUresult in_context(void);    // an error where none is, or where the device has failed
void count_launch(int device);
CUcontext primary_context(int device);

// driver_stream.c
CUstream stream_of(CUstream stream);  // also of the handles that stand for default streams
uint64_t next_id(void);
CUresult enqueue(CUstream stream, CUgraphNodeType type, CUfunction function, double seconds);
bool is_captured(CUstream stream);
double transfer_seconds(uint64_t bytes, bool within_device);

// driver_graph.c
CUgraphNode add_node(CUgraph graph, CUgraphNodeType type, CUfunction function, double seconds);

// driver_memory.c
bool is_device_memory(const void *address);
bool is_pinned_memory(const void *address);
CUresult map_device_memory(int device, size_t bytes, void **address);
void trim_pools(void);

// driver_results.c
void find_result(CUfunction function);
