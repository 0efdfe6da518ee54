// cuDNN's recurrent layers. Weights: of each layer (a direction is a layer) the matrices of its gates
// for the input, then those for the state, then a projection's; behind all matrices all biases, in the
// same order. That torch finds matrices of one kind side by side is all it asks of the order. What
// cuDNN keeps for backward is not documented: here each gate, the state and the cell of each step.
#include <cudnn.h>
#include <string.h>

#include "machine.h"

#define DNN EXPORT cudnnStatus_t

struct cudnnRNNStruct {
    cudnnDataType_t type;
    int gates, directions, layers;  // layers: of both directions
    size_t input, hidden, output;   // widths; the output is the hidden state, or its projection
    bool is_biased;
};
struct cudnnRNNDataStruct {
    size_t steps, batch;
};

DNN cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t rnn, cudnnRNNAlgo_t algorithm,
                             cudnnRNNMode_t cell, cudnnRNNBiasMode_t bias,
                             cudnnDirectionMode_t direction, cudnnRNNInputMode_t input,
                             cudnnDataType_t type, cudnnDataType_t precision, cudnnMathType_t math,
                             int32_t input_width, int32_t hidden, int32_t projected,
                             int32_t layers, cudnnDropoutDescriptor_t dropout, uint32_t flags) {
    int directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1;
    *rnn = (struct cudnnRNNStruct){
        .type = type,
        .gates = cell == CUDNN_LSTM ? 4 : cell == CUDNN_GRU ? 3 : 1,
        .directions = directions,
        .layers = layers * directions,
        .input = input_width,
        .hidden = hidden,
        .output = projected,
        .is_biased = bias != CUDNN_RNN_NO_BIAS,
    };
    return CUDNN_STATUS_SUCCESS;
}

DNN cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t data, cudnnDataType_t type,
                              cudnnRNNDataLayout_t layout, int steps, int batch, int width,
                              const int lengths[], void *fill) {
    *data = (struct cudnnRNNDataStruct){steps, batch};
    return CUDNN_STATUS_SUCCESS;
}

static size_t item(const struct cudnnRNNStruct *rnn) {
    return rnn->type == CUDNN_DATA_DOUBLE ? 8 : rnn->type == CUDNN_DATA_FLOAT ? 4 : 2;
}
static bool is_projected(const struct cudnnRNNStruct *rnn) { return rnn->output != rnn->hidden; }

// Rows and columns of a layer's matrix: gates for the input, gates for the state, the projection.
static size_t rows(const struct cudnnRNNStruct *rnn, int matrix) {
    return matrix == 2 * rnn->gates ? rnn->output : rnn->hidden;
}
static size_t columns(const struct cudnnRNNStruct *rnn, int layer, int matrix) {
    if (matrix == 2 * rnn->gates) return rnn->hidden;
    if (matrix >= rnn->gates) return rnn->output;
    return layer < rnn->directions ? rnn->input : rnn->output * rnn->directions;
}

// Elements of all matrices before one; before `layers` of the first, of all.
static size_t elements_before(const struct cudnnRNNStruct *rnn, int layer, int matrix) {
    int of_layer = 2 * rnn->gates + is_projected(rnn);
    size_t elements = 0;
    for (int l = 0; l <= layer && l < rnn->layers; l++)
        for (int m = 0; m < (l < layer ? of_layer : matrix); m++)
            elements += rows(rnn, m) * columns(rnn, l, m);
    return elements;
}

DNN cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, size_t *bytes) {
    size_t biases = rnn->is_biased ? rnn->layers * 2 * rnn->gates * rnn->hidden : 0;
    *bytes = item(rnn) * (elements_before(rnn, rnn->layers, 0) + biases);
    return CUDNN_STATUS_SUCCESS;
}

DNN cudnnGetRNNWeightParams(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn, int32_t layer,
                            size_t bytes, const void *weights, int32_t matrix,
                            cudnnTensorDescriptor_t shape, void **address,
                            cudnnTensorDescriptor_t bias_shape, void **bias) {
    int height = rows(rnn, matrix), width = columns(rnn, layer, matrix);
    bool has_bias = rnn->is_biased && matrix < 2 * rnn->gates;
    size_t before = elements_before(rnn, rnn->layers, 0);
    size_t bias_at = before + (layer * 2 * rnn->gates + matrix) * rnn->hidden;
    if (address) *address = (char *)weights + item(rnn) * elements_before(rnn, layer, matrix);
    if (bias) *bias = has_bias ? (char *)weights + item(rnn) * bias_at : NULL;
    int sizes[] = {1, height, width}, strides[] = {height * width, width, 1};
    if (shape) cudnnSetTensorNdDescriptor(shape, rnn->type, 3, sizes, strides);
    if (bias_shape && has_bias) {
        int bias_sizes[] = {1, height, 1}, bias_strides[] = {height, 1, 1};
        cudnnSetTensorNdDescriptor(bias_shape, rnn->type, 3, bias_sizes, bias_strides);
    }
    return CUDNN_STATUS_SUCCESS;
}

DNN cudnnGetRNNTempSpaceSizes(cudnnHandle_t handle, cudnnRNNDescriptor_t rnn,
                              cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t data,
                              size_t *workspace, size_t *reserve) {
    size_t kept = data->steps * data->batch * rnn->hidden * rnn->layers * (rnn->gates + 2);
    if (workspace) *workspace = 0;
    if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? kept * item(rnn) : 0;
    return CUDNN_STATUS_SUCCESS;
}
