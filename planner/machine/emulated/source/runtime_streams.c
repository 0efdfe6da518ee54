// The runtime's streams, events and graphs.
#include "runtime.h"

RUNTIME cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return DO_IN_CONTEXT(cuStreamCreateWithPriority(stream, flags, priority));
}

RUNTIME cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

RUNTIME cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

RUNTIME cudaStreamDestroy(cudaStream_t stream) { return DO_IN_CONTEXT(cuStreamDestroy(stream)); }
RUNTIME cudaStreamQuery(cudaStream_t stream) { return DO_IN_CONTEXT(cuStreamQuery(stream)); }

RUNTIME cudaStreamSynchronize(cudaStream_t stream) {
    return DO_IN_CONTEXT(cuStreamSynchronize(stream));
}

RUNTIME cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return DO_IN_CONTEXT(cuStreamGetPriority(stream, priority));
}

RUNTIME cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return DO_IN_CONTEXT(cuStreamWaitEvent(stream, event, flags));
}

RUNTIME cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data,
                              unsigned flags) {
    return DO_IN_CONTEXT(cuStreamAddCallback(stream, (CUstreamCallback)callback, data, flags));
}

RUNTIME cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    return DO_IN_CONTEXT(cuLaunchHostFunc(stream, function, data));
}

RUNTIME cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return DO_IN_CONTEXT(cuEventCreate(event, flags));
}

RUNTIME cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
RUNTIME cudaEventDestroy(cudaEvent_t event) { return remember(cuEventDestroy(event)); }
RUNTIME cudaEventQuery(cudaEvent_t event) { return DO_IN_CONTEXT(cuEventQuery(event)); }

RUNTIME cudaEventSynchronize(cudaEvent_t event) {
    return DO_IN_CONTEXT(cuEventSynchronize(event));
}

RUNTIME cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return DO_IN_CONTEXT(cuEventRecordWithFlags(event, stream, flags));
}

RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

RUNTIME cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return remember(cuEventElapsedTime(milliseconds, start, end));
}

// ---- capture and graphs

RUNTIME cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return DO_IN_CONTEXT(cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}

RUNTIME cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    return DO_IN_CONTEXT(cuStreamEndCapture(stream, graph));
}

RUNTIME cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return DO_IN_CONTEXT(cuStreamIsCapturing(stream, (CUstreamCaptureStatus *)status));
}

#if CUDART_VERSION >= 13000
RUNTIME cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                 unsigned long long *id, cudaGraph_t *graph,
                                 const cudaGraphNode_t **after, const cudaGraphEdgeData **edges,
                                 size_t *count) {
    return DO_IN_CONTEXT(cuStreamGetCaptureInfo(stream, (CUstreamCaptureStatus *)status,
                                                (cuuint64_t *)id, graph, after,
                                                (const CUgraphEdgeData **)edges, count));
}
#else
RUNTIME cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                    unsigned long long *id, cudaGraph_t *graph,
                                    const cudaGraphNode_t **after, size_t *count) {
    return DO_IN_CONTEXT(cuStreamGetCaptureInfo(stream, (CUstreamCaptureStatus *)status,
                                                (cuuint64_t *)id, graph, after, count));
}
#endif

RUNTIME cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    return remember(cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}

RUNTIME cudaGraphDestroy(cudaGraph_t graph) { return remember(cuGraphDestroy(graph)); }

RUNTIME cudaGraphExecDestroy(cudaGraphExec_t graph) { return remember(cuGraphExecDestroy(graph)); }

RUNTIME cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return remember(cuGraphGetNodes(graph, nodes, count));
}

RUNTIME cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                      unsigned long long flags) {
    return DO_IN_CONTEXT(cuGraphInstantiateWithFlags(executable, graph, flags));
}

RUNTIME cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                             unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

RUNTIME cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return DO_IN_CONTEXT(cuGraphLaunch(executable, stream));
}

RUNTIME cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy,
                             unsigned references, unsigned flags) {
    return remember(cuUserObjectCreate(object, data, destroy, references, flags));
}

RUNTIME cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
    return remember(cuUserObjectRelease(object, count));
}

RUNTIME cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                  unsigned flags) {
    return remember(cuGraphRetainUserObject(graph, object, count, flags));
}
