// cuBLAS: handles, and matrix products that take the time of their FLOPs. Every other function is a
// generated stub: one launch in the handle's stream (docs.nvidia.com/cuda/cublas).
#include "machine.h"

#include <stdlib.h>

#define BLAS EXPORT int

typedef struct {
    stream_t stream;
    int math_mode, pointer_mode;
} handle_t;

enum { R_16F = 2, R_16BF = 14 };  // cudaDataType of library_types.h
enum { TF32_MATH = 3 };           // CUBLAS_TF32_TENSOR_OP_MATH
enum { EXECUTION_FAILED = 13 };   // CUBLAS_STATUS_EXECUTION_FAILED

static int matmul(handle_t *handle, int m, int n, int k, int count, int type) {
    bool is_half = type == R_16F || type == R_16BF;
    enum rate rate = is_half ? HALF : handle->math_mode == TF32_MATH ? TF32 : FP32;
    return emulated_matmul(handle->stream, (double)m * n * k * count, rate) ? EXECUTION_FAILED : 0;
}

EXPORT int emulated_blas_call(handle_t *handle) {
    return emulated_work(handle->stream, 0) ? EXECUTION_FAILED : 0;
}

BLAS cublasCreate_v2(handle_t **handle) {
    *handle = calloc(1, sizeof **handle);
    return 0;
}
BLAS cublasDestroy_v2(handle_t *handle) {
    free(handle);
    return 0;
}
BLAS cublasSetStream_v2(handle_t *handle, stream_t stream) {
    handle->stream = stream;
    return 0;
}
BLAS cublasGetStream_v2(handle_t *handle, stream_t *stream) {
    *stream = handle->stream;
    return 0;
}
BLAS cublasSetMathMode(handle_t *handle, int mode) {
    handle->math_mode = mode;
    return 0;
}
BLAS cublasGetMathMode(handle_t *handle, int *mode) {
    *mode = handle->math_mode;
    return 0;
}
BLAS cublasSetPointerMode_v2(handle_t *handle, int mode) {
    handle->pointer_mode = mode;
    return 0;
}
BLAS cublasGetPointerMode_v2(handle_t *handle, int *mode) {
    *mode = handle->pointer_mode;
    return 0;
}
BLAS cublasSetWorkspace_v2(handle_t *handle, void *workspace, size_t bytes) { return 0; }
BLAS cublasSetAtomicsMode(handle_t *handle, int mode) { return 0; }
BLAS cublasSetSmCountTarget(handle_t *handle, int count) { return 0; }
EXPORT const char *cublasGetStatusString(int status) { return status ? "failure" : "success"; }
#define PRODUCT(name, type)                                                      \
    BLAS name(handle_t *handle, int ta, int tb, int m, int n, int k) {           \
        return matmul(handle, m, n, k, 1, type);                                 \
    }
PRODUCT(cublasSgemm_v2, 0)
PRODUCT(cublasDgemm_v2, 1)

BLAS cublasGemmEx(handle_t *handle, int ta, int tb, int m, int n, int k, const void *alpha,
                  const void *a, int type) {
    return matmul(handle, m, n, k, 1, type);
}

BLAS cublasSgemmStridedBatched(handle_t *handle, int ta, int tb, int m, int n, int k,
                               const void *alpha, const void *a, int lda, long long stride_a,
                               const void *b, int ldb, long long stride_b, const void *beta,
                               void *c, int ldc, long long stride_c, int count) {
    return matmul(handle, m, n, k, count, 0);
}

BLAS cublasGemmStridedBatchedEx(handle_t *handle, int ta, int tb, int m, int n, int k,
                                const void *alpha, const void *a, int type_a, int lda,
                                long long stride_a, const void *b, int type_b, int ldb,
                                long long stride_b, const void *beta, void *c, int type_c, int ldc,
                                long long stride_c, int count) {
    return matmul(handle, m, n, k, count, type_a);
}
