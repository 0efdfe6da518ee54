// NVML: what nvidia-smi and torch.cuda.utilization ask. Structs and numbers are those of the NVML
// API reference (docs.nvidia.com/deploy/nvml-api), as the wheels do not bring nvml.h.
//
// Clocks, temperature and power are those of an idle card, or of one at its limit while a process
// has a context: plausible figures, and nothing that was measured.
#include "machine.h"

#include <stdio.h>
#include <string.h>

#define NVML EXPORT int

typedef const gpu_t *handle_t;
typedef unsigned long long bytes_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       GPU_IS_LOST = 15 };

static int index_of(handle_t device) { return (int)(device - machine()->gpus); }
static bool is_busy(handle_t device) { return holders_of(index_of(device), NULL, 0) > 0; }

// Every question about a device that fell off the bus.
#define HEAR(device) if (is_lost(index_of(device))) return GPU_IS_LOST
// "Not supported" for MIG instances, as NVML's reference says of utilisation, clocks and power.
#define HEAR_WHOLE(device) HEAR(device); if ((device)->is_slice) return NOT_SUPPORTED

NVML nvmlInit_v2(void) { return SUCCESS; }
NVML nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
NVML nvmlShutdown(void) { return SUCCESS; }

EXPORT const char *nvmlErrorString(int error) {
    return error == SUCCESS         ? "Success"
           : error == NOT_SUPPORTED ? "Not Supported"
           : error == NOT_FOUND     ? "Not Found"
           : error == GPU_IS_LOST   ? "GPU is lost"
                                    : "Unknown Error";
}

static int say(char *text, unsigned length, const char *said) {
    snprintf(text, length, "%s", said);
    return SUCCESS;
}

// The driver that came with a CUDA version: 580 with 13.0 (CUDA Toolkit release notes, table 3).
NVML nvmlSystemGetDriverVersion(char *text, unsigned length) {
    return say(text, length, machine()->driver_version >= 13000 ? "580.65.06" : "570.26");
}
NVML nvmlSystemGetCudaDriverVersion(int *version) {
    *version = machine()->driver_version;
    return SUCCESS;
}
NVML nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}

// ---- devices: all of the machine's, whatever CUDA_VISIBLE_DEVICES says

NVML nvmlDeviceGetCount_v2(unsigned *count) {
    *count = machine()->num_gpus;
    return SUCCESS;
}

NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, handle_t *device) {
    if ((int)index >= machine()->num_gpus) return INVALID_ARGUMENT;
    *device = &machine()->gpus[index];
    return is_lost((int)index) ? GPU_IS_LOST : SUCCESS;
}

NVML nvmlDeviceGetHandleByPciBusId_v2(const char *text, handle_t *device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || !bus) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device) ? NOT_FOUND : SUCCESS;
}

NVML nvmlDeviceGetUUID(handle_t device, char *text, unsigned length) {
    unsigned char uuid[16];
    device_uuid(index_of(device), uuid);
    char said[64], *at = said + sprintf(said, device->is_slice ? "MIG-" : "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    return say(text, length, said);
}

NVML nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *device) {
    char text[64];
    for (int i = 0; i < machine()->num_gpus; i++) {
        nvmlDeviceGetUUID(&machine()->gpus[i], text, sizeof text);
        if (!strcmp(text, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, device);
    }
    return NOT_FOUND;
}

NVML nvmlDeviceGetName(handle_t device, char *text, unsigned length) {
    HEAR(device);
    return say(text, length, device->name);
}

typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} pci_t;
NVML nvmlDeviceGetPciInfo_v3(handle_t device, pci_t *pci) {
    HEAR(device);
    *pci = (pci_t){.bus = index_of(device) + 1};
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", pci->bus);
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}

NVML nvmlDeviceGetCudaComputeCapability(handle_t device, int *major, int *minor) {
    HEAR(device);
    *major = device->capability / 10;
    *minor = device->capability % 10;
    return SUCCESS;
}

NVML nvmlDeviceGetMigMode(handle_t device, unsigned *current, unsigned *pending) {
    HEAR(device);
    if (!device->is_slice) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

// ---- memory and processes

// The card's memory is more than what CUDA calls its total: the rest is the driver's, and reserved.
static bytes_t whole(handle_t device) {
    bytes_t gib = 1ull << 30;
    return (device->memory_bytes + gib - 1) / gib * gib;
}

static bytes_t said_used(handle_t device) {
    int64_t bytes = (int64_t)(used_memory(index_of(device)) + device->kept_bytes);
    bytes += machine()->nvml_used_error;
    return bytes > 0 ? (bytes_t)bytes : 0;
}

typedef struct {
    bytes_t total, free, used;
} memory_t;
NVML nvmlDeviceGetMemoryInfo(handle_t device, memory_t *memory) {
    HEAR(device);
    bytes_t reserved = whole(device) - device->memory_bytes, used = said_used(device) + reserved;
    *memory = (memory_t){whole(device), whole(device) - used, used};
    return SUCCESS;
}

typedef struct {
    unsigned version;
    bytes_t total, reserved, free, used;
} memory_v2_t;
NVML nvmlDeviceGetMemoryInfo_v2(handle_t device, memory_v2_t *memory) {
    HEAR(device);
    bytes_t used = said_used(device), total = whole(device);
    *memory = (memory_v2_t){memory->version, total, total - device->memory_bytes,
                            device->memory_bytes - used, used};
    return SUCCESS;
}

typedef struct {
    unsigned pid;
    bytes_t used;
    unsigned gpu_instance, compute_instance;
} process_t;
#define MOST_PROCESSES 512
NVML nvmlDeviceGetComputeRunningProcesses_v3(handle_t device, unsigned *count, process_t *found) {
    HEAR(device);
    holder_t holders[MOST_PROCESSES];
    unsigned held = holders_of(index_of(device), holders, MOST_PROCESSES), room = *count;
    if (machine()->hides_processes) held = 0;  // other namespaces' ids, as a container sees it
    *count = held;
    if (held > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < held; i++)
        found[i] = (process_t){holders[i].pid, holders[i].bytes, 0xffffffff, 0xffffffff};
    return SUCCESS;
}
NVML nvmlDeviceGetComputeRunningProcesses_v2(handle_t device, unsigned *count, process_t *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, found);
}

typedef struct {
    unsigned pid;
    bytes_t used;
} process_v1_t;
NVML nvmlDeviceGetComputeRunningProcesses(handle_t device, unsigned *count, process_v1_t *found) {
    process_t listed[MOST_PROCESSES];
    unsigned room = *count;
    *count = MOST_PROCESSES;
    int error = nvmlDeviceGetComputeRunningProcesses_v3(device, count, listed);
    if (error) return error;
    if (*count > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) found[i] = (process_v1_t){listed[i].pid, listed[i].used};
    return SUCCESS;
}

// ---- figures of the card

typedef struct {
    unsigned gpu, memory;
} utilization_t;
NVML nvmlDeviceGetUtilizationRates(handle_t device, utilization_t *rates) {
    HEAR_WHOLE(device);
    *rates = is_busy(device) ? (utilization_t){97, 61} : (utilization_t){0, 0};
    return SUCCESS;
}

enum { MEMORY_CLOCK = 2 };
NVML nvmlDeviceGetClockInfo(handle_t device, int kind, unsigned *mhz) {
    HEAR_WHOLE(device);
    if (kind == MEMORY_CLOCK) *mhz = is_busy(device) ? device->memory_clock_mhz : 405;
    else *mhz = is_busy(device) ? device->clock_mhz : 210;
    return SUCCESS;
}

#define GIVES(function, value)                                \
    NVML function(handle_t device, unsigned *given) {         \
        HEAR_WHOLE(device);                                   \
        *given = (value);                                     \
        return SUCCESS;                                       \
    }
GIVES(nvmlDeviceGetPowerUsage, 1000 * (is_busy(device) ? device->watts * 9 / 10 : 28))
GIVES(nvmlDeviceGetEnforcedPowerLimit, 1000 * device->watts)
GIVES(nvmlDeviceGetPowerManagementLimit, 1000 * device->watts)
GIVES(nvmlDeviceGetPowerManagementDefaultLimit, 1000 * device->watts)
GIVES(nvmlDeviceGetPerformanceState, is_busy(device) ? 2 : 8)
GIVES(nvmlDeviceGetPersistenceMode, 1)
GIVES(nvmlDeviceGetDisplayActive, 0)
GIVES(nvmlDeviceGetComputeMode, 0)
GIVES(nvmlDeviceGetCurrPcieLinkGeneration, 4)
GIVES(nvmlDeviceGetMaxPcieLinkGeneration, 4)
GIVES(nvmlDeviceGetCurrPcieLinkWidth, 16)
GIVES(nvmlDeviceGetMaxPcieLinkWidth, 16)

NVML nvmlDeviceGetMaxClockInfo(handle_t device, int kind, unsigned *mhz) {
    HEAR_WHOLE(device);
    *mhz = kind == MEMORY_CLOCK ? device->memory_clock_mhz : device->clock_mhz;
    return SUCCESS;
}
NVML nvmlDeviceGetTemperature(handle_t device, int sensor, unsigned *celsius) {
    HEAR_WHOLE(device);
    *celsius = is_busy(device) ? 64 : 38;
    return SUCCESS;
}
NVML nvmlDeviceGetCurrentClocksEventReasons(handle_t device, unsigned long long *reasons) {
    HEAR_WHOLE(device);
    *reasons = is_busy(device) ? 0 : 1;  // nvmlClocksEventReasonGpuIdle
    return SUCCESS;
}
NVML nvmlDeviceGetCurrentClocksThrottleReasons(handle_t device, unsigned long long *reasons) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

NVML nvmlDeviceGetNvLinkRemoteDeviceType(handle_t device, unsigned link, unsigned *type) {
    return NOT_SUPPORTED;
}
NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(handle_t device, unsigned link, pci_t *pci) {
    return NOT_SUPPORTED;
}
typedef struct {  // nvmlGpuFabricInfo_v2_t, as far as any version has it
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
} fabric_t;
NVML nvmlDeviceGetGpuFabricInfoV(handle_t device, fabric_t *fabric) {
    HEAR(device);
    fabric->state = 0;  // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED; torch takes no other answer
    fabric->status = SUCCESS;
    return SUCCESS;
}
