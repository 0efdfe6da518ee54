// cuBLASLt: one algorithm for every product, which needs no workspace.
#include "machine.h"

#include <stdlib.h>
#include <string.h>

#define BLAS EXPORT int

typedef struct {
    int type, count;
    uint64_t rows, columns;
} layout_t;
typedef struct {  // cublasLtMatmulHeuristicResult_t of cublasLt.h
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
} heuristic_t;

enum { BATCH_COUNT = 5 };         // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
enum { R_16F = 2, R_16BF = 14 };  // cudaDataType of library_types.h
enum { TF32_COMPUTE = 77 };       // CUBLAS_COMPUTE_32F_FAST_TF32
enum { EXECUTION_FAILED = 13 };   // CUBLAS_STATUS_EXECUTION_FAILED of cublas_api.h

static int create(void **object) {
    *object = calloc(1, 64);
    return 0;
}
static int destroy(void *object) {
    free(object);
    return 0;
}

EXPORT size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
BLAS cublasLtCreate(void **handle) { return create(handle); }
BLAS cublasLtDestroy(void *handle) { return destroy(handle); }
BLAS cublasLtMatmulDescCreate(int **descriptor, int compute, int scale) {
    create((void **)descriptor);
    **descriptor = compute;
    return 0;
}
BLAS cublasLtMatmulDescDestroy(void *descriptor) { return destroy(descriptor); }
BLAS cublasLtMatmulPreferenceCreate(void **preference) { return create(preference); }
BLAS cublasLtMatmulPreferenceDestroy(void *preference) { return destroy(preference); }

BLAS cublasLtMatrixLayoutCreate(layout_t **layout, int type, uint64_t rows, uint64_t columns,
                                int64_t leading) {
    *layout = calloc(1, sizeof **layout);
    **layout = (layout_t){type, 1, rows, columns};
    return 0;
}
BLAS cublasLtMatrixLayoutDestroy(layout_t *layout) { return destroy(layout); }
BLAS cublasLtMatrixLayoutSetAttribute(layout_t *layout, int attribute, const void *value,
                                      size_t bytes) {
    if (attribute == BATCH_COUNT) layout->count = *(const int32_t *)value;
    return 0;
}

BLAS cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                    void *d, void *preference, int wanted, heuristic_t *found,
                                    int *count) {
    *count = wanted > 0;
    if (wanted > 0) *found = (heuristic_t){.waves = 1};
    return 0;
}

// The inner dimension is what A has beside the rows of D, transposed or not.
BLAS cublasLtMatmul(void *handle, const int *compute, const void *alpha, const void *a,
                    layout_t *layout_a, const void *b, layout_t *layout_b, const void *beta,
                    const void *c, layout_t *layout_c, void *d, layout_t *layout_d,
                    const void *algorithm, void *workspace, size_t bytes, stream_t stream) {
    double inner = (double)layout_a->rows * layout_a->columns / layout_d->rows;
    bool is_half = layout_a->type == R_16F || layout_a->type == R_16BF;
    double outputs = (double)layout_d->rows * layout_d->columns * layout_d->count;
    enum rate rate = is_half ? HALF : *compute == TF32_COMPUTE ? TF32 : FP32;
    return emulated_matmul(stream, outputs * inner, rate) ? EXECUTION_FAILED : 0;
}
