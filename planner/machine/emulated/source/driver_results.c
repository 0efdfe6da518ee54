// The few kernels of torch whose results steer a training, and which are therefore carried out:
// fills, copies to another type, joins of vectors, comparisons and what is made of them, reductions to
// one number (a loss or a norm is 0), and what sizes of tensors are made of: counts. Values are taken
// to be finite, so that what asks for an overflow hears that there was none. All others leave in
// memory what was there.
//
// Arguments are those of torch's headers: ATen/native/cuda/CUDALoops.cuh gives elementwise kernels
// (int count, functor, array of addresses, the result's first).
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <string.h>

#define MOST_BYTES (1 << 16)
#define MOST_SCANNED_BYTES (1 << 24)

static void *result_of(void **arguments) { return *(void **)arguments[2]; }

static void write_all(void **arguments, const void *value, size_t width) {
    int count = *(int *)arguments[0];
    char *at = result_of(arguments);
    if (count <= 0 || count * width > MOST_BYTES || !is_device_memory(at)) return;
    for (int i = 0; i < count; i++) memcpy(at + i * width, value, width);
}

// The type that a template or a function is of, as the Itanium C++ ABI writes it.
static size_t width_of(const char *mangled) {
    if (*mangled == 'N') {  // of c10
        char type[16] = {0};
        strncpy(type, mangled, sizeof type - 1);
        return strstr(type, "7complex") ? 0 : strstr(type, "Float8") ? 1 : 2;
    }
    return strchr("bha", *mangled) ? 1 : strchr("st", *mangled) ? 2 : strchr("ijf", *mangled) ? 4
           : strchr("lmxyd", *mangled) ? 8 : 0;
}

static void fill(const char *name, void **arguments) {
    size_t width = width_of(strstr(name, "FillFunctorI") + strlen("FillFunctorI"));
    if (width) write_all(arguments, arguments[1], width);
}

// What is computed of one number, as of a loss: 0 too, of 8 bytes where the functor says so. A block
// has 512, so 4 may be written.
static void number(const char *name, void **arguments) {
    char *at = result_of(arguments);
    const char *functor = strstr(name, "Functor");
    size_t width = functor && (functor = strchr(functor, 'I')) && functor[1] == 'l' ? 8 : 4;
    if (*(int *)arguments[0] == 1 && is_device_memory(at)) memset(at, 0, width);
}

static void elementwise_true(const char *name, void **arguments) {
    write_all(arguments, &(char){1}, 1);
}

static void elementwise_false(const char *name, void **arguments) {
    write_all(arguments, &(char){0}, 1);
}

// What is asked of a conjunction that was carried out, or of a mask, is carried out too.
static void elementwise_not(const char *name, void **arguments) {
    int count = *(int *)arguments[0];
    char *to = result_of(arguments), *from = ((void **)arguments[2])[1];
    size_t width = width_of(strstr(name, "EUl") + 3);
    if (count <= 0 || !width || count * width > MOST_SCANNED_BYTES) return;
    if (!is_device_memory(to) || !is_device_memory(from)) return;
    for (int i = 0; i < count; i++) to[i] = !memcmp(from + i * width, &(uint64_t){0}, width);
}

// The functor holds the value (ATen/native/cuda/Indexing.cu).
static void masked_fill(const char *name, void **arguments) {
    int count = *(int *)arguments[0];
    char **at = arguments[2];
    size_t width = width_of(strstr(name, "EUl") + 3);
    if (count <= 0 || !width || count * width > MOST_SCANNED_BYTES) return;
    if (!is_device_memory(at[0]) || !is_device_memory(at[1]) || !is_device_memory(at[2])) return;
    for (int i = 0; i < count; i++)
        memcpy(at[0] + i * width, at[2][i] ? (char *)arguments[1] : at[1] + i * width, width);
}

static void elementwise_or(const char *name, void **arguments) {
    int count = *(int *)arguments[0];
    char **at = arguments[2];
    if (count <= 0 || count > MOST_BYTES || !is_device_memory(at[0])) return;
    for (int i = 0; i < count; i++) at[0][i] = at[1][i] | at[2][i];
}

// A number beside a limit, as a norm beside 0: the functor is the operator, of >=, >, <= and <, and
// the limit (ATen/native/cuda/CompareKernels.cu).
static void compare_with(const char *name, void **arguments) {
    int count = *(int *)arguments[0];
    const struct {
        int operator;
        float limit;
    } *functor = arguments[1];
    char *to = result_of(arguments);
    const float *from = ((float **)arguments[2])[1];
    if (count <= 0 || count > MOST_BYTES || !is_device_memory(to)) return;
    for (int i = 0; i < count; i++) {
        float value = from[i], limit = functor->limit;
        bool results[] = {value >= limit, value > limit, value <= limit, value < limit};
        to[i] = results[functor->operator & 3];
    }
}

// c10/core/ScalarType.h
enum { BYTE, CHAR, SHORT, INT, LONG, HALF_, FLOAT, DOUBLE, BOOL = 11, BFLOAT16 = 15 };

static double read_number(const char *at, int type) {
    switch (type) {
        case BYTE: case BOOL: return *(uint8_t *)at;
        case CHAR: return *(int8_t *)at;
        case SHORT: return *(int16_t *)at;
        case INT: return *(int32_t *)at;
        case LONG: return *(int64_t *)at;
        case FLOAT: return *(float *)at;
        case DOUBLE: return *(double *)at;
        case BFLOAT16: {
            uint32_t bits = (uint32_t) * (uint16_t *)at << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            return value;
        }
        default: return 0;  // of 16 and 8 bits: nothing that steers is kept in them
    }
}

static void write_number(char *at, int type, double value) {
    switch (type) {
        case BYTE: *(uint8_t *)at = value; break;
        case BOOL: *(uint8_t *)at = value != 0; break;
        case CHAR: *(int8_t *)at = value; break;
        case SHORT: *(int16_t *)at = value; break;
        case INT: *(int32_t *)at = value; break;
        case LONG: *(int64_t *)at = value; break;
        case FLOAT: *(float *)at = value; break;
        case DOUBLE: *(double *)at = value; break;
        case BFLOAT16: {
            float number = value;
            memcpy(at, (char *)&number + 2, 2);
        }
    }
}

// A copy to another type: LoadWithCast and StoreWithCast are the sixth and the seventh argument, each
// a type (of a byte) and the bytes of an element (ATen/native/cuda/MemoryAccess.cuh).
static void cast(const char *name, void **arguments) {
    int count = *(int *)arguments[0];
    char *to = result_of(arguments), *from = ((void **)arguments[2])[1];
    const struct side {
        int8_t type;
        uint32_t width;
    } *source = arguments[5], *target = arguments[6];
    size_t most = source->type == BOOL ? MOST_SCANNED_BYTES : MOST_BYTES;
    if (count <= 0 || count * (size_t)(source->width + target->width) > most) return;
    if (!is_device_memory(to) || !is_device_memory(from)) return;
    for (int i = 0; i < count; i++)
        write_number(to + i * target->width, target->type,
                     read_number(from + i * source->width, source->type));
}

// x == y, and not x == a number that is looked for, as infinity is; the functor begins with the
// operator: 0 is ==, 1 is != (ATen/native/cuda/CompareEQKernel.cu).
static void compare(const char *name, void **arguments) {
    bool is_inequality = *(int *)arguments[1] == 1, is_of_two = strstr(name, "BinaryFunctor");
    write_all(arguments, &(char){is_of_two != is_inequality}, 1);
}

// at::native::ReduceOp of ATen/native/cuda/Reduce.cuh, behind operation and identity, whose sizes
// differ by type.
typedef struct {
    uint32_t divisor, multiplier, shift;
} divider_t;
typedef struct {
    struct {
        int element_bytes, num_inputs, num_outputs, others[13];
    } config;
    struct {
        int dimensions;
        divider_t sizes[25];
        uint32_t strides[25];
    } input;
    struct {
        int dimensions;
        divider_t sizes[25];
        uint32_t strides[25][2];
    } output;  // and then the addresses of the source and of the results, at the next 8 bytes
} reduction_t;

// The address of the results, where there are some; `offset` is that of the configuration, `which` is
// 1, or 2 for the others of a reduction that has two.
static char *results_of(void **arguments, size_t offset, int which) {
    const reduction_t *found = (const void *)((char *)arguments[0] + offset);
    int count = found->config.num_outputs;
    char *at = ((char **)(((uintptr_t)(found + 1) + 7) & ~(uintptr_t)7))[which];
    return count > 0 && count <= MOST_BYTES && is_device_memory(at) ? at : NULL;
}

static void reduce(void **arguments, char value) {  // of bools
    const reduction_t *found = (const void *)((char *)arguments[0] + 4);
    char *results = results_of(arguments, 4, 1);
    if (results) memset(results, value, found->config.num_outputs);
}

// One number, and any number of whole ones: counts, places of maxima.
static void reduce_to_zero(const char *name, void **arguments) {
    bool is_whole = strstr(name, "EEjl") != NULL;  // what the results are of
    bool is_pair = strstr(name, "9MinMaxOpsI");
    bool is_placed = strstr(name, "6MaxOpsI") || strstr(name, "6MinOpsI");
    for (size_t offset = 4; offset <= 32; offset += 4) {
        const reduction_t *found = (const void *)((char *)arguments[0] + offset);
        char *results = results_of(arguments, offset, 1);
        int width = found->config.element_bytes, count = found->config.num_outputs;
        if (!results || width <= 0 || width > 16 || (count != 1 && !is_whole && !is_placed)) continue;
        if (count == 1 || is_whole) memset(results, 0, is_whole ? 8 * count : width < 4 ? 4 : 8);
        char *others = is_pair || is_placed ? results_of(arguments, offset, 2) : NULL;
        if (others) memset(others, 0, is_pair && !is_whole ? 4 : 8 * count);
        return;
    }
}

// nll_loss_forward_reduce_cuda_kernel_*: the loss, and the weight it was divided by.
static void no_loss(const char *name, void **arguments) {
    char **loss = arguments[0];
    if (is_device_memory(*loss)) memset(*loss, 0, 4);
}

static void all(const char *name, void **arguments) { reduce(arguments, 1); }
static void any(const char *name, void **arguments) { reduce(arguments, 0); }

// torch.cat, as of labels that are evaluated and of sizes: addresses, and by uint32_t offsets, sizes
// and numbers of elements of as many tensors as the template says, then whether each is contiguous,
// and shapes of those that are not; the result's shape, in vectors of 16 bytes or in elements; which
// dimension is joined; and that one's stride (ATen/native/cuda/Shape.cu).
typedef struct {
    uint32_t sizes[4], strides[4];
} shape_t;

static uint64_t place_of(uint64_t index, const shape_t *shape, unsigned num, unsigned joined,
                         uint32_t size) {
    uint64_t place = 0;
    for (unsigned d = num - 1; d > 0; d--) {
        uint32_t along = d == joined ? size : shape->sizes[d];
        place += index % along * shape->strides[d];
        index /= along;
    }
    return place + index * shape->strides[0];
}

static void join(const char *name, void **arguments) {
    unsigned width, num, most;
    const char *type = strstr(name, "OpaqueTypeILj");
    if (!type || sscanf(type, "OpaqueTypeILj%uEEEjLi%uELi%uE", &width, &num, &most) != 3) return;
    bool is_of_vectors = strstr(name, "_vectorized");
    if (num > 4 || (is_of_vectors && num > 1)) return;
    char *to = *(char **)arguments[0], **from = arguments[1];
    const uint32_t *offsets = (const uint32_t *)(from + most), *sizes = offsets + most;
    const uint32_t *counts = sizes + most;
    const bool *contiguous = (const bool *)(counts + most);
    const shape_t *shapes = (const shape_t *)(contiguous + most);
    shape_t whole = *(shape_t *)arguments[2];
    unsigned joined = *(unsigned *)arguments[3];
    uint64_t stride = *(uint32_t *)arguments[4], bytes = width;
    if (joined >= num || !stride || !is_device_memory(to)) return;
    if (is_of_vectors) {  // whole rows of `stride` elements, one after the other
        whole = (shape_t){{whole.sizes[0] * (16 / width) / stride}, {1}};
        bytes *= stride;
    }
    for (unsigned d = 0; d < num; d++) bytes *= whole.sizes[d];
    if (bytes > MOST_BYTES) return;
    for (unsigned i = 0, end = 0; i < most && end < whole.sizes[joined]; i++) {
        end = offsets[i] + sizes[i];
        if (end > whole.sizes[joined] || !is_device_memory(from[i])) return;
        for (uint32_t at = 0; at < counts[i]; at++) {
            uint64_t source = contiguous[i] ? at : place_of(at, &shapes[i], num, joined, sizes[i]);
            uint64_t target = offsets[i] * stride + place_of(at, &whole, num, joined, sizes[i]);
            memcpy(to + target * width, from[i] + source * width, width);
        }
    }
}

// What selects by values is counted. nonzero, a boolean index and masked_select select none; unique
// finds one value; bincount counts up to 0.
static unsigned selections;
EXPORT unsigned emulated_selections(void) { return selections; }

static void select_as_many(void **arguments, int at, int64_t number, size_t width) {
    void *many = *(void **)arguments[at];
    if (is_device_memory(many)) memcpy(many, &number, width);
    selections++;
}

static void select_by_values(const char *name, void **arguments) {
    select_as_many(arguments, 3, strstr(name, "equal_to") != NULL, 8);  // a block has 512 bytes
}

static void one_run(const char *name, void **arguments) { select_as_many(arguments, 4, 1, 8); }
static void one_value(const char *name, void **arguments) { select_as_many(arguments, 3, 1, 4); }
static void count_selection(const char *name, void **arguments) { selections++; }

static void bounds(const char *name, void **arguments) {  // of which bincount makes its size
    selections += strstr(name, "MinMaxOpsIl") != NULL;
    reduce_to_zero(name, arguments);
}

// A sum of a few by cub, as of what nonzero finds.
static void none(const char *name, void **arguments) {
    void *at = *(void **)arguments[1];
    if (is_device_memory(at)) memset(at, 0, 4);
}

// Running sums of whole numbers (long), of which the last is a size: true where they are of a mask,
// else 0, as nothing says whether what is there was computed.
static void running_sums(int64_t *to, const int64_t *from, size_t rows, size_t width) {
    size_t count = rows * width;
    if (8 * count > MOST_SCANNED_BYTES || !is_device_memory(to)) return;
    bool is_mask = from && is_device_memory(from);
    for (size_t i = 0; i < count && is_mask; i++) is_mask = (uint64_t)from[i] <= 1;
    if (!is_mask) memset(to, 0, 8 * count);
    for (size_t i = 0; i < count && is_mask; i++) to[i] = from[i] + (i % width ? to[i - 1] : 0);
}

static void scan(const char *name, void **arguments) {
    const int64_t *from = strstr(name, "PKlPl") ? *(int64_t **)arguments[0] : NULL;
    running_sums(*(int64_t **)arguments[1], from, 1, *(uint32_t *)arguments[6]);
}

static void scan_rows(const char *name, void **arguments) {
    int64_t **at[] = {arguments[0], arguments[1]};
    running_sums(*at[0], *at[1], *(uint32_t *)arguments[2], *(uint32_t *)arguments[3]);
}

void find_result(CUfunction function) {
    const char *name = function->name;
    bool is_elementwise = strstr(name, "vectorized_elementwise_kernel") ||
                          strstr(name, "unrolled_elementwise_kernel");
    bool is_reduction = strstr(name, "reduce_kernel") && strstr(name, "ReduceOp");
    bool is_of_bools = is_reduction && strstr(name, "EEjb");  // and has indices of 32 bits
    if (is_of_bools && strstr(name, "and_kernel_cuda")) function->result = all;
    else if (is_of_bools && strstr(name, "or_kernel_cuda")) function->result = any;
    else if (is_reduction) function->result = bounds;
    else if (strstr(name, "nll_loss_forward_reduce")) function->result = no_loss;
    else if (strstr(name, "adjacent_difference_kernel")) function->result = count_selection;
    // of cub and thrust
    else if (strstr(name, "DeviceSelectSweepKernel")) function->result = select_by_values;
    else if (strstr(name, "DeviceReduceByKeyKernel")) function->result = one_run;
    else if (strstr(name, "DeviceUniqueByKeySweep")) function->result = one_run;
    else if (strstr(name, "11UniqueAgent")) function->result = one_value;
    else if (strstr(name, "DeviceReduceSingleTileKernel")) function->result = none;
    else if (strstr(name, "DeviceScanKernel") && strstr(name, "PlNS0_13ScanTileState"))
        function->result = scan;
    else if (strstr(name, "scan_innermost_dimIlSt4plusIl")) function->result = scan_rows;
    else if (strstr(name, "CatArrayBatchedCopy")) function->result = join;
    if (!is_elementwise) return;
    if (strstr(name, "direct_copy_kernel") && strstr(name, "StoreWithCast")) {
        function->result = cast;
        return;
    }
    if (strstr(name, "FillFunctorI")) function->result = fill;
    else if (strstr(name, "CompareEqFunctor")) function->result = compare;
    else if (strstr(name, "MulFunctorIb")) function->result = elementwise_true;
    else if (strstr(name, "logical_and_kernel")) function->result = elementwise_true;
    else if (strstr(name, "logical_or_kernel")) function->result = elementwise_false;
    else if (strstr(name, "logical_not_kernel") && strstr(name, "EUl"))
        function->result = elementwise_not;
    else if (strstr(name, "bitwise_not_kernel") && strstr(name, "EUlbE"))
        function->result = elementwise_not;
    else if (strstr(name, "masked_fill_kernel") && strstr(name, "EUl"))
        function->result = masked_fill;
    else if (strstr(name, "BitwiseOrFunctorIb") && !strstr(name, "UnaryFunctor"))
        function->result = elementwise_or;
    else if (strstr(name, "compare_scalar_kernelIf"))
        function->result = compare_with;
    else function->result = number;
}
