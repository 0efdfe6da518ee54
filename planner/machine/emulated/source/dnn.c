// cuDNN: descriptors, and its graph API with one engine for every graph, which needs no workspace.
// What the real heuristics would choose is not known without NVIDIA's driver. Every other function
// is a generated stub (docs.nvidia.com/deeplearning/cudnn).
#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

#define DNN EXPORT cudnnStatus_t
#define NUM_ENGINES 64  // of each graph; some are asked for by number

struct cudnnContext {
    stream_t stream;
};

DNN cudnnCreate(cudnnHandle_t *handle) {
    *handle = calloc(1, sizeof **handle);
    return CUDNN_STATUS_SUCCESS;
}
DNN cudnnDestroy(cudnnHandle_t handle) {
    free(handle);
    return CUDNN_STATUS_SUCCESS;
}
DNN cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}
DNN cudnnGetStream(cudnnHandle_t handle, cudaStream_t *stream) {
    *stream = handle->stream;
    return CUDNN_STATUS_SUCCESS;
}

EXPORT size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
DNN cudnnGetProperty(libraryPropertyType kind, int *value) {
    *value = kind == MAJOR_VERSION   ? CUDNN_MAJOR
             : kind == MINOR_VERSION ? CUDNN_MINOR
                                     : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT const char *cudnnGetErrorString(cudnnStatus_t status) {
    if (status == CUDNN_STATUS_NOT_SUPPORTED) return "not emulated";
    return status ? "failure" : "CUDNN_STATUS_SUCCESS";
}
EXPORT void cudnnGetLastErrorString(char *text, size_t bytes) {
    if (bytes) *text = 0;
}

// ---- descriptors: what is set of them is kept where torch asks for it again

struct cudnnTensorStruct {
    cudnnDataType_t type;
    int dimensions, sizes[CUDNN_DIM_MAX], strides[CUDNN_DIM_MAX];
};

DNN cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t tensor, cudnnDataType_t type, int dimensions,
                               const int *sizes, const int *strides) {
    tensor->type = type;
    tensor->dimensions = dimensions;
    memcpy(tensor->sizes, sizes, dimensions * sizeof *sizes);
    memcpy(tensor->strides, strides, dimensions * sizeof *strides);
    return CUDNN_STATUS_SUCCESS;
}

DNN cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t tensor, int wanted,
                               cudnnDataType_t *type, int *dimensions, int *sizes, int *strides) {
    int given = tensor->dimensions < wanted ? tensor->dimensions : wanted;
    *type = tensor->type;
    *dimensions = tensor->dimensions;
    memcpy(sizes, tensor->sizes, given * sizeof *sizes);
    memcpy(strides, tensor->strides, given * sizeof *strides);
    return CUDNN_STATUS_SUCCESS;
}

#define DESCRIPTOR(name, type)                                                   \
    DNN cudnnCreate##name##Descriptor(cudnn##type##_t *descriptor) {             \
        *descriptor = calloc(1, 1024);                                           \
        return CUDNN_STATUS_SUCCESS;                                             \
    }                                                                            \
    DNN cudnnDestroy##name##Descriptor(cudnn##type##_t descriptor) {             \
        free(descriptor);                                                        \
        return CUDNN_STATUS_SUCCESS;                                             \
    }
DESCRIPTOR(Tensor, TensorDescriptor)
DESCRIPTOR(Filter, FilterDescriptor)
DESCRIPTOR(Convolution, ConvolutionDescriptor)
DESCRIPTOR(Activation, ActivationDescriptor)
DESCRIPTOR(Dropout, DropoutDescriptor)
DESCRIPTOR(Pooling, PoolingDescriptor)
DESCRIPTOR(RNN, RNNDescriptor)
DESCRIPTOR(RNNData, RNNDataDescriptor)
DESCRIPTOR(CTCLoss, CTCLossDescriptor)
DESCRIPTOR(SpatialTransformer, SpatialTransformerDescriptor)

DNN cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t *bytes) {
    *bytes = 1 << 20;
    return CUDNN_STATUS_SUCCESS;
}

// ---- sizes of scratch, all 0

#define NO_BYTES(name, ...)                                                      \
    EXPORT cudnnStatus_t name(__VA_ARGS__, size_t *bytes) {                      \
        *bytes = 0;                                                              \
        return CUDNN_STATUS_SUCCESS;                                             \
    }
#define TENSOR const cudnnTensorDescriptor_t
NO_BYTES(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, cudnnHandle_t handle,
         cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, TENSOR x, TENSOR z, TENSOR y,
         TENSOR scale, const cudnnActivationDescriptor_t activation)
NO_BYTES(cudnnGetBatchNormalizationBackwardExWorkspaceSize, cudnnHandle_t handle,
         cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, TENSOR x, TENSOR y, TENSOR dy,
         TENSOR dz, TENSOR dx, TENSOR scale, const cudnnActivationDescriptor_t activation)
NO_BYTES(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, cudnnHandle_t handle,
         cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops,
         const cudnnActivationDescriptor_t activation, TENSOR x)
NO_BYTES(cudnnGetCTCLossWorkspaceSize, cudnnHandle_t handle, TENSOR scores, TENSOR gradients,
         const int *labels, const int *label_lengths, const int *input_lengths,
         cudnnCTCLossAlgo_t algorithm, cudnnCTCLossDescriptor_t loss)
NO_BYTES(cudnnGetCTCLossWorkspaceSize_v8, cudnnHandle_t handle, cudnnCTCLossAlgo_t algorithm,
         cudnnCTCLossDescriptor_t loss, TENSOR scores, TENSOR gradients)

// ---- the graph API: whatever is asked for is there once, and is 0

DNN cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                 cudnnBackendDescriptor_t *descriptor) {
    *descriptor = calloc(1, 1);
    return CUDNN_STATUS_SUCCESS;
}
DNN cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    free(descriptor);
    return CUDNN_STATUS_SUCCESS;
}
DNN cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) { return CUDNN_STATUS_SUCCESS; }
DNN cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                             cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    return CUDNN_STATUS_SUCCESS;
}

DNN cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                             cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                             int64_t wanted, int64_t *count, void *values) {
    bool is_one = type == CUDNN_TYPE_INT64 || name == CUDNN_ATTR_ENGINEHEUR_RESULTS ||
                  name == CUDNN_ATTR_ENGINECFG_ENGINE ||
                  name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
    bool is_engine_count = name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
    if (type == CUDNN_TYPE_INT64 && values && wanted) *(int64_t *)values = is_engine_count ? NUM_ENGINES : 0;
    if (type == CUDNN_TYPE_INT32 && values && wanted) *(int32_t *)values = 0;  // shared memory
    if (count) *count = is_one;
    return CUDNN_STATUS_SUCCESS;
}

DNN cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                        cudnnBackendDescriptor_t variants) {
    return emulated_work(handle->stream, 0) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
