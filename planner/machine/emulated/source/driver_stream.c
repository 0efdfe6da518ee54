// Streams and events, and the emulated clock that they keep.
//
// Work is over as soon as it is asked for; each stream only adds up what it would have cost, by the
// rates of the configuration. Those are the catalogue's: no time that an event reports is measured.
// Where the machine `waits`, who synchronises sleeps until the clock of the wall is there, too.
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define HOST_LINK 31.5e9  // bytes/s: PCIe 4.0 x16, one way

static struct CUstream_st legacy[MAX_GPUS], per_thread[MAX_GPUS];
static double latest[MAX_GPUS];  // when the last work of any stream is done
static uint64_t ids = 1024;

uint64_t next_id(void) { return __atomic_add_fetch(&ids, 1, __ATOMIC_RELAXED); }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return machine()->waits ? time.tv_sec + time.tv_nsec * 1e-9 : 0;
}

static void wait_until(double instant) {
    double left = instant - now();
    if (!machine()->waits || left <= 0) return;
    struct timespec time = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
    nanosleep(&time, NULL);
}

double transfer_seconds(uint64_t bytes, bool within_device) {
    double rate = device_gpu(current_device())->bandwidth;
    if (!rate) return 0;
    return within_device ? 2 * bytes / rate : bytes / HOST_LINK;  // read, and written
}

CUstream stream_of(CUstream stream) {
    if (stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD) return stream;
    int device = current_device() < 0 ? 0 : current_device();
    CUstream found = stream == CU_STREAM_PER_THREAD ? &per_thread[device] : &legacy[device];
    found->context = primary_context(device);
    return found;
}

bool is_captured(CUstream stream) {
    CUstream s = stream_of(stream);
    if (s->capture && !s->capture->is_running) s->capture = NULL;
    return s->capture != NULL;
}

// Puts work into a stream, or into the graph that it is being captured into.
CUresult enqueue(CUstream stream, CUgraphNodeType type, CUfunction function, double seconds) {
    TRY(in_context());
    CUstream s = stream_of(stream);
    if (is_captured(s)) {
        s->last = add_node(s->capture->graph, type, function, seconds);
        return CUDA_SUCCESS;
    }
    double begin = now();
    s->ready = (s->ready > begin ? s->ready : begin) + seconds;
    double *last = &latest[current_device()];
    if (s->ready > *last) *last = s->ready;
    return CUDA_SUCCESS;
}

// To wait for a stream that is being captured "is not permitted", and breaks the capture.
static CUresult wait_for(CUstream s) {
    TRY(in_context());
    if (is_captured(s)) {
        s->capture->is_broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    wait_until(s->ready);
    trim_pools();
    return CUDA_SUCCESS;
}

DRIVER cuCtxSynchronize(void) {
    TRY(wait_for(stream_of(NULL)));
    wait_until(latest[current_device()]);
    return CUDA_SUCCESS;
}

DRIVER cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    TRY(in_context());
    *stream = calloc(1, sizeof **stream);
    (*stream)->context = primary_context(current_device());
    (*stream)->priority = priority;
    return CUDA_SUCCESS;
}

DRIVER cuStreamDestroy(CUstream stream) {
    if (stream == stream_of(stream)) free(stream);
    return CUDA_SUCCESS;
}

DRIVER cuStreamGetPriority(CUstream stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return CUDA_SUCCESS;
}

#undef cuStreamGetCtx
DRIVER cuStreamGetCtx(CUstream stream, CUcontext *context) {
    *context = stream_of(stream)->context;
    return CUDA_SUCCESS;
}

DRIVER cuStreamGetCtx_v2(CUstream stream, CUcontext *context, CUgreenCtx *green) {
    if (green) *green = NULL;
    return cuStreamGetCtx(stream, context);
}

DRIVER cuStreamQuery(CUstream stream) {
    TRY(in_context());
    return stream_of(stream)->ready > now() && machine()->waits ? CUDA_ERROR_NOT_READY
                                                                : CUDA_SUCCESS;
}

DRIVER cuStreamSynchronize(CUstream stream) { return wait_for(stream_of(stream)); }

DRIVER cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    TRY(in_context());
    CUstream s = stream_of(stream);
    if (event->capture && event->capture->is_running && !is_captured(s)) s->capture = event->capture;
    if (event->at > s->ready) s->ready = event->at;
    return CUDA_SUCCESS;
}

DRIVER cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    bool is_later = is_captured(stream);
    TRY(enqueue(stream, CU_GRAPH_NODE_TYPE_HOST, NULL, 0));
    if (!is_later) function(argument);
    return CUDA_SUCCESS;
}

DRIVER cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data, unsigned flags) {
    TRY(in_context());
    callback(stream, CUDA_SUCCESS, data);
    return CUDA_SUCCESS;
}

DRIVER cuStreamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
    *(volatile uint32_t *)at = value;
    return in_context();
}

DRIVER cuEventCreate(CUevent *event, unsigned flags) {
    TRY(in_context());
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    return CUDA_SUCCESS;
}

DRIVER cuEventDestroy(CUevent event) {
    free(event);
    return CUDA_SUCCESS;
}

DRIVER cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    TRY(in_context());
    CUstream s = stream_of(stream);
    double instant = now();
    event->is_recorded = true;
    event->capture = is_captured(s) ? s->capture : NULL;
    event->at = s->ready > instant ? s->ready : instant;
    return CUDA_SUCCESS;
}

static bool is_in_capture(CUevent event) {
    return event->capture && event->capture->is_running;
}

// torch's NCCL holds what it sent until its watchdog, which looks every 100 ms, sees that it is done.
// While it is held it sees nothing done, so that no figure depends on how busy the host is.
static bool is_watchdog_held;
EXPORT void emulated_hold_watchdog(bool is_held) { is_watchdog_held = is_held; }

static bool is_held(void) {
    char name[16] = "";
    if (!is_watchdog_held || pthread_getname_np(pthread_self(), name, sizeof name)) return false;
    return !strcmp(name, "pt_nccl_watchdg");
}

DRIVER cuEventQuery(CUevent event) {
    TRY(in_context());
    if (is_in_capture(event)) return CUDA_ERROR_CAPTURED_EVENT;
    if (is_held()) return CUDA_ERROR_NOT_READY;
    return machine()->waits && event->at > now() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

DRIVER cuEventSynchronize(CUevent event) {
    TRY(in_context());
    if (is_in_capture(event)) return CUDA_ERROR_CAPTURED_EVENT;
    wait_until(event->at);
    trim_pools();
    return CUDA_SUCCESS;
}

// Both symbols: cuEventElapsedTime_v2 came with CUDA 12.8.
static CUresult elapsed(float *milliseconds, CUevent start, CUevent end) {
    bool is_timed = !((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING);
    if (!start->is_recorded || !end->is_recorded || !is_timed) return CUDA_ERROR_INVALID_HANDLE;
    *milliseconds = (float)((end->at - start->at) * 1e3);
    return CUDA_SUCCESS;
}
#undef cuEventElapsedTime
DRIVER cuEventElapsedTime(float *ms, CUevent start, CUevent end) { return elapsed(ms, start, end); }
DRIVER cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    return elapsed(ms, start, end);
}
