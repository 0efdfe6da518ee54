/* A management library with two GPUs, for machines without one. Signatures are those of nvml.h. */
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
#define GIB (1ULL << 30)
static int index_of(void *device) { return (int)(long)device - 1; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index > 1) return 2;
  *device = (void *)(long)(index + 1);
  return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "999.1", size); return 0; }
int nvmlDeviceGetName(void *d, char *text, unsigned size) {
  strncpy(text, index_of(d) ? "Fake B" : "Fake A", size);
  return 0;
}
int nvmlDeviceGetUUID(void *d, char *text, unsigned size) {
  strncpy(text, index_of(d) ? "GPU-bbbb" : "GPU-aaaa", size);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
  *major = 9;
  *minor = index_of(d);
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *d, memory_v2 *m) {
  if (m->version != (sizeof(memory_v2) | (2 << 24))) return 2;
  m->total = (index_of(d) ? 48 : 24) * GIB;
  m->reserved = GIB / 2;
  m->used = 3 * GIB;
  m->free = m->total - m->reserved - m->used;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, process *list) {
  if (*count < 200) return *count = 200, 7;
  for (unsigned i = 0; i < 200; i++)
    list[i] = (process){i + 1, i ? ~0ULL : GIB, ~0u, ~0u};
  *count = index_of(d) ? 0 : 200;
  return 0;
}
int nvmlDeviceGetClockInfo(void *d, int kind, unsigned *mhz) {
  *mhz = kind == 1 ? 1500 : 2600;
  return 0;
}
int nvmlDeviceGetMaxClockInfo(void *d, int kind, unsigned *mhz) { *mhz = 1980; return 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *celsius) { *celsius = 66; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned *milliwatts) { return 3; /* not supported */ }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *bits) {
  *bits = 0x4 | 0x40 | 0x1;
  return 0;
}
