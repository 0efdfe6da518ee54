// Errors by name, entry points by name and version, and what is not emulated.
#include "driver.h"

#include <stdio.h>
#include <string.h>

// Generated from the installed cuda.h: each function once, in order, and which versions it has.
typedef struct {
    const char *name;
    void *function;
} entry_t;
typedef struct {
    const char *name;
    int version;
    const char *symbol;
} version_t;
extern const entry_t emulated_entries[];
extern const version_t emulated_versions[];
extern const size_t emulated_num_entries, emulated_num_versions;

static const struct {
    CUresult error;
    const char *name, *text;
} errors[] = {
#define ERROR(name, text) {CUDA_##name, "CUDA_" #name, text},
    ERROR(SUCCESS, "no error")
    ERROR(ERROR_INVALID_VALUE, "invalid argument")
    ERROR(ERROR_OUT_OF_MEMORY, "out of memory")
    ERROR(ERROR_NOT_INITIALIZED, "initialization error")
    ERROR(ERROR_NO_DEVICE, "no CUDA-capable device is detected")
    ERROR(ERROR_INVALID_DEVICE, "invalid device ordinal")
    ERROR(ERROR_INVALID_CONTEXT, "invalid device context")
    ERROR(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device")
    ERROR(ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture")
    ERROR(ERROR_INVALID_HANDLE, "invalid resource handle")
    ERROR(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")
    ERROR(ERROR_NOT_FOUND, "named symbol not found")
    ERROR(ERROR_NOT_READY, "device not ready")
    ERROR(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")
    ERROR(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is "
          "already mapped")
    ERROR(ERROR_NOT_SUPPORTED, "operation not supported")
    ERROR(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")
    ERROR(ERROR_STREAM_CAPTURE_INVALIDATED,
          "operation failed due to a previous error during capture")
    ERROR(ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing "
          "stream")
    ERROR(ERROR_UNKNOWN, "unknown error")
};

DRIVER cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].error != error) continue;
        *name = errors[i].name;
        return CUDA_SUCCESS;
    }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

DRIVER cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].error != error) continue;
        *text = errors[i].text;
        return CUDA_SUCCESS;
    }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

static void *find(const char *name) {
    size_t low = 0, high = emulated_num_entries;
    while (low < high) {
        size_t middle = (low + high) / 2;
        int order = strcmp(emulated_entries[middle].name, name);
        if (!order) return emulated_entries[middle].function;
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return NULL;
}

// The newest version of a function that is not newer than what was asked for.
static const char *symbol_for(const char *name, int version) {
    const char *symbol = name;
    for (size_t i = 0; i < emulated_num_versions; i++)
        if (!strcmp(emulated_versions[i].name, name) && emulated_versions[i].version <= version)
            symbol = emulated_versions[i].symbol;
    return symbol;
}

DRIVER cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult *status) {
    *function = find(symbol_for(name, version));
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// The tables that NVIDIA's libraries ask of its driver are not documented, and by some of them a
// library makes sure that the driver is NVIDIA's. This one is not NVIDIA's, and answers none of them.
DRIVER cuGetExportTable(const void **table, const CUuuid *id) {
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

// What generated stubs do. The log says which were called; what a library refuses is also said to who
// watches the program, once: its own error would blame the program or the card.
EXPORT int emulated_missing(const char *name) {
    log_line("not emulated: %s", name);
    return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORT int emulated_refused(const char *name, int status) {
    static const char *said[64];
    static int count;
    log_line("not emulated: %s", name);
    for (int i = 0; i < count; i++)
        if (said[i] == name) return status;
    if (count < 64) said[count++] = name;
    fprintf(stderr, "planner: %s is not emulated. What fails here is the emulation's fault, and says "
                    "nothing of the program or of a real card.\n", name);
    return status;
}
EXPORT int emulated_success(const char *name) {
    log_line("nothing done: %s", name);
    return 0;
}
