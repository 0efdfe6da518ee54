// Stream capture and graphs. A graph keeps what its nodes are and cost, and no edges: nothing that
// runs on an emulated device has to come in order.
#include "driver.h"

#include <stdlib.h>
#include <string.h>

static __thread CUstreamCaptureMode mode;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

CUgraphNode add_node(CUgraph graph, CUgraphNodeType type, CUfunction function, double seconds) {
    CUgraphNode node = calloc(1, sizeof *node);
    *node = (struct CUgraphNode_st){type, function, seconds, NULL};
    pthread_mutex_lock(&mutex);
    if (graph->last) graph->last->next = node;
    else graph->first = node;
    graph->last = node;
    graph->count++;
    graph->seconds += seconds;
    pthread_mutex_unlock(&mutex);
    return node;
}

static CUresult begin(CUstream stream, CUgraph graph) {
    TRY(in_context());
    if (stream_of(stream) != stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (is_captured(stream)) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = calloc(1, sizeof *stream->capture);
    *stream->capture = (capture_t){next_id(), graph, true, false};
    stream->last = NULL;
    return CUDA_SUCCESS;
}

DRIVER cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode capture_mode) {
    return begin(stream, calloc(1, sizeof(struct CUgraph_st)));
}

DRIVER cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    if (!is_captured(stream)) return CUDA_ERROR_ILLEGAL_STATE;
    capture_t *capture = stream_of(stream)->capture;
    capture->is_running = false;
    stream_of(stream)->capture = NULL;
    *graph = capture->is_broken ? NULL : capture->graph;
    return capture->is_broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static CUstreamCaptureStatus status_of(CUstream stream) {
    if (!is_captured(stream)) return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream_of(stream)->capture->is_broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                                 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

DRIVER cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = status_of(stream);
    return in_context();
}

// Two symbols, of which torch before CUDA 13 asks the one without edges.
#undef cuStreamGetCaptureInfo_v2
DRIVER cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                 CUgraph *graph, const CUgraphNode **after, size_t *count) {
    *status = status_of(stream);
    if (*status == CU_STREAM_CAPTURE_STATUS_NONE) return in_context();
    CUstream s = stream_of(stream);
    if (id) *id = s->capture->id;
    if (graph) *graph = s->capture->graph;
    if (after) *after = &s->last;
    if (count) *count = s->last != NULL;
    return in_context();
}

DRIVER cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                 CUgraph *graph, const CUgraphNode **after,
                                 const CUgraphEdgeData **edges, size_t *count) {
    if (edges) *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, after, count);
}

DRIVER cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *exchanged) {
    CUstreamCaptureMode before = mode;
    mode = *exchanged;
    *exchanged = before;
    return CUDA_SUCCESS;
}

DRIVER cuGraphDestroy(CUgraph graph) {
    for (CUgraphNode node = graph->first, next; node; node = next) {
        next = node->next;
        free(node);
    }
    free(graph);
    return CUDA_SUCCESS;
}

DRIVER cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
    size_t filled = 0;
    if (!nodes) {
        *count = graph->count;
        return CUDA_SUCCESS;
    }
    for (CUgraphNode n = graph->first; n && filled < *count; n = n->next) nodes[filled++] = n;
    *count = filled;
    return CUDA_SUCCESS;
}

// A graph that can be launched is what its capture cost.
struct CUgraphExec_st {
    double seconds;
};

DRIVER cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph,
                                   unsigned long long flags) {
    TRY(in_context());
    *executable = malloc(sizeof **executable);
    (*executable)->seconds = graph->seconds;
    return CUDA_SUCCESS;
}

DRIVER cuGraphExecDestroy(CUgraphExec executable) {
    free(executable);
    return CUDA_SUCCESS;
}

DRIVER cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    return enqueue(stream, CU_GRAPH_NODE_TYPE_GRAPH, NULL, executable->seconds);
}

// What a graph keeps alive is never freed: graphs are few, and processes end.
DRIVER cuUserObjectCreate(CUuserObject *object, void *data, CUhostFn destroy, unsigned references,
                          unsigned flags) {
    *object = malloc(1);
    return CUDA_SUCCESS;
}
DRIVER cuUserObjectRelease(CUuserObject object, unsigned count) { return CUDA_SUCCESS; }
DRIVER cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
    return CUDA_SUCCESS;
}
