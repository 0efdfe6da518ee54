// The emulated machine, as all of the libraries see it: its GPUs, and who holds how much of them.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 16

typedef struct {
    char name[96], notice[384];
    int capability;  // 86 is 8.6
    int num_sms, threads_per_sm, clock_mhz, memory_clock_mhz, bus_bits, watts;
    bool is_slice;  // a MIG instance, of which NVML tells less
    bool lacks_virtual_memory;
    uint64_t memory_bytes, context_bytes, kept_bytes, l2_bytes;
    uint64_t illegal_access_after, lost_after;  // launches; 0 never
    double half_flops, tf32_flops, fp32_flops, bandwidth, launch_seconds;  // of the emulated clock
} gpu_t;

typedef struct {
    gpu_t gpus[MAX_GPUS];
    int num_gpus;
    int visible[MAX_GPUS], num_visible;  // as CUDA_VISIBLE_DEVICES chooses and orders them
    int driver_version;                  // 13000 is CUDA 13.0
    bool hides_processes, waits;
    int64_t nvml_used_error;
    char table[256], log[256];
} machine_t;

// driver_module.c, for the other libraries: work put into a stream.
typedef struct CUstream_st *stream_t;
int emulated_work(stream_t stream, double seconds);
enum rate { FP32, TF32, HALF };
int emulated_matmul(stream_t stream, double multiply_adds, enum rate rate);

// configuration.c
const machine_t *machine(void);
void device_uuid(int gpu, unsigned char uuid[16]);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

// table.c: `gpu` counts the machine's, not the process's visible ones.
typedef struct {
    pid_t pid;
    uint64_t bytes;
} holder_t;
bool take_memory(int gpu, uint64_t bytes);
void give_memory(int gpu, uint64_t bytes);
bool open_context(int gpu);
uint64_t used_memory(int gpu);
uint64_t free_memory(int gpu);
int holders_of(int gpu, holder_t *holders, int limit);
void lose_gpu(int gpu);
bool is_lost(int gpu);
