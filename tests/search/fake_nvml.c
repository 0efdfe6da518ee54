/* A management library with two GPUs, for machines without one. Signatures are those of nvml.h.
   The variable FAKE_NVML, read at every call, makes it answer as some drivers do: words that are
   listed below, and `used=BYTES`, `total=BYTES`, `own=BYTES`.
     zero, na, host, none, right   what it tells of the caller's process (0 bytes, not available,
                                   under another id, nothing, `own` bytes)
     v2, long                      which list of processes there is: only the second version of it,
                                   or the third with entries of 32 bytes
     mig                           the cards are split
     renamed                       the reasons for lower clocks only under their newer name
     sick                          the first card has broken memory, links that are down and no P2P
     lost                          the second card does not answer */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; unsigned long long cc; } process_long;
typedef struct { char legacy[16]; unsigned numbers[5]; char bus_id[32]; } pci;
#define GIB (1ULL << 30)
#define NOT_FOUND 13
static int index_of(void *device) { return (int)(long)device - 1; }
static const char *asked(void) { const char *text = getenv("FAKE_NVML"); return text ? text : ""; }
static int says(const char *word) { return strstr(asked(), word) != 0; }
static unsigned long long figure(const char *name, unsigned long long otherwise) {
  const char *at = strstr(asked(), name);
  return at ? strtoull(at + strlen(name), 0, 10) : otherwise;
}
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index > 1) return 2;
  if (index && says("lost")) return 15; /* NVML_ERROR_GPU_IS_LOST */
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
int nvmlDeviceGetPciInfo_v3(void *d, pci *found) {
  snprintf(found->bus_id, sizeof found->bus_id, "00000000:%02X:00.0", 1 + index_of(d));
  return 0;
}
int nvmlDeviceGetMigMode(void *d, unsigned *current, unsigned *pending) {
  *current = *pending = says("mig");
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
  *major = 9;
  *minor = index_of(d);
  return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *d, memory_v2 *m) {
  if (m->version != (sizeof(memory_v2) | (2 << 24))) return 2;
  m->total = figure("total=", (index_of(d) ? 48 : 24) * GIB);
  m->reserved = GIB / 2;
  m->used = figure("used=", 3 * GIB);
  m->free = m->total - m->reserved - m->used;
  return 0;
}
/* Two processes where one of the words is said: another's, and the caller's as the word has it. */
static unsigned tell(unsigned *pid, unsigned long long *used) {
  pid[0] = 1, used[0] = GIB;
  pid[1] = says("host") ? getpid() + 100000 : getpid();
  used[1] = says("zero") ? 0 : says("na") ? ~0ULL : figure("own=", GIB);
  return says("none") ? 0 : 2;
}
#define LIST(kind)                                                           \
  unsigned pid[2], number; unsigned long long used[2];                       \
  number = tell(pid, used);                                                  \
  if (*count < number) return *count = number, 7;                            \
  memset(list, 0, sizeof(kind) * number);                                    \
  for (unsigned i = 0; i < number; i++)                                      \
    ((kind *)list)[i].pid = pid[i], ((kind *)list)[i].used = used[i];        \
  return *count = number, 0;
int nvmlDeviceGetComputeRunningProcesses_v2(void *d, unsigned *count, void *list) {
  LIST(process)
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, void *list) {
  if (says("v2")) return NOT_FOUND;
  if (says("long")) { LIST(process_long) }
  if (says("zero") || says("na") || says("host") || says("none") || says("right")) { LIST(process) }
  if (*count < 200) return *count = 200, 7;
  for (unsigned i = 0; i < 200; i++)
    ((process *)list)[i] = (process){i + 1, i ? ~0ULL : GIB, ~0u, ~0u};
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
typedef struct { unsigned gpu, memory; } utilization;
int nvmlDeviceGetUtilizationRates(void *d, utilization *found) {
  if (says("mig")) return 3; /* not supported */
  found->gpu = 87;
  found->memory = 41;
  return 0;
}
int nvmlDeviceGetPerformanceState(void *d, unsigned *state) { *state = 0; return 0; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *found) { *found = 4; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *found) { *found = 4; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *found) { *found = 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *found) { *found = 16; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *found) { *found = 500000; return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, unsigned *found) { *found = 700000; return 0; }
static int reasons(unsigned long long *bits) {
  *bits = 0x4 | 0x40 | (says("idle") ? 0x1 : 0);
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *bits) {
  return says("renamed") ? NOT_FOUND : reasons(bits);
}
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *bits) {
  return says("renamed") ? reasons(bits) : NOT_FOUND;
}
static int is_sick(void *d) { return says("sick") && !index_of(d); }
int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *count) { *count = says("mig") ? 7 : 0; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, unsigned index, void **found) {
  return index < 2 ? 0 : 6; /* not found */
}
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int counter, unsigned long long *count) {
  *count = is_sick(d) && kind == 1 && counter == 0 ? 3 : 0; /* uncorrectable, volatile */
  return 0;
}
int nvmlDeviceGetRemappedRows(void *d, unsigned *corrected, unsigned *rows, unsigned *pending, unsigned *failed) {
  *corrected = 0, *rows = *pending = *failed = is_sick(d);
  return 0;
}
int nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *active) {
  if (link > 3) return 2;
  *active = !(is_sick(d) && link == 3);
  return 0;
}
int nvmlDeviceGetP2PStatus(void *d, void *other, int index, unsigned *status) {
  *status = says("sick") ? 1 : 0; /* the chipset does not support it */
  return index == 0 ? 0 : 2;
}
typedef struct { unsigned id, scope; long long time, latency; int type, error; union { double d; unsigned u; } value; } field;
int nvmlDeviceGetFieldValues(void *d, int count, field *found) {
  found->error = count == 1 && found->id == 230 ? 0 : 3; /* the recovery action */
  found->value.u = is_sick(d);
  return 0;
}
