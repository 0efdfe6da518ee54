// The machine as the text file that PLANNER_EMULATED_GPU names describes it: `key value`, a line
// each. `gpu NAME` begins a GPU; what follows is that GPU's. planner/machine/emulated/machine.py writes it.
#include "machine.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static machine_t the_machine;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void fail(const char *what, const char *value) {
    fprintf(stderr, "planner.machine.emulated: %s '%s'.\n", what, value);
    exit(1);  // an emulated machine that is not the one asked for would answer wrongly
}

#define NUMBER(field) if (!strcmp(key, #field)) { gpu->field = strtoull(value, NULL, 10); return; }
#define REAL(field) if (!strcmp(key, #field)) { gpu->field = strtod(value, NULL); return; }

static void set_of_gpu(gpu_t *gpu, const char *key, const char *value) {
    NUMBER(capability) NUMBER(num_sms) NUMBER(threads_per_sm) NUMBER(clock_mhz)
    NUMBER(memory_clock_mhz) NUMBER(bus_bits) NUMBER(watts) NUMBER(is_slice)
    NUMBER(lacks_virtual_memory)
    if (!strcmp(key, "notice")) {
        snprintf(gpu->notice, sizeof gpu->notice, "%s", value);
        return;
    }
    NUMBER(memory_bytes) NUMBER(context_bytes) NUMBER(kept_bytes) NUMBER(l2_bytes)
    NUMBER(illegal_access_after) NUMBER(lost_after)
    REAL(half_flops) REAL(tf32_flops) REAL(fp32_flops) REAL(bandwidth) REAL(launch_seconds)
    fail("unknown key", key);
}

static void set(machine_t *m, const char *key, const char *value) {
    if (!strcmp(key, "gpu")) {
        if (m->num_gpus == MAX_GPUS) fail("too many GPUs; one too many is", value);
        snprintf(m->gpus[m->num_gpus++].name, sizeof m->gpus->name, "%s", value);
    } else if (m->num_gpus) {
        set_of_gpu(&m->gpus[m->num_gpus - 1], key, value);
    } else if (!strcmp(key, "table")) {
        snprintf(m->table, sizeof m->table, "%s", value);
    } else if (!strcmp(key, "log")) {
        snprintf(m->log, sizeof m->log, "%s", value);
    } else if (!strcmp(key, "driver_version")) {
        m->driver_version = atoi(value);
    } else if (!strcmp(key, "hides_processes")) {
        m->hides_processes = atoi(value);
    } else if (!strcmp(key, "waits")) {
        m->waits = atoi(value);
    } else if (!strcmp(key, "nvml_used_error")) {
        m->nvml_used_error = strtoll(value, NULL, 10);
    } else {
        fail("unknown key", key);
    }
}

// Made up, and the same in each process. nvmlDeviceGetHandleByUUID finds a GPU by it.
void device_uuid(int gpu, unsigned char uuid[16]) {
    memcpy(uuid, "planner-emulated", 16);
    uuid[15] = (unsigned char)gpu;
}

static int gpu_of_uuid(const char *text) {
    const char *last = strrchr(text, '-');
    unsigned gpu;
    return last && strlen(last) == 13 && sscanf(last + 11, "%x", &gpu) == 1 ? (int)gpu : -1;
}

// CUDA C++ Programming Guide, "CUDA environment variables": the first unknown entry ends the list.
static void choose_visible(machine_t *m) {
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    if (!given) {
        for (int i = 0; i < m->num_gpus; i++) m->visible[m->num_visible++] = i;
        return;
    }
    char copy[1024], *rest;
    snprintf(copy, sizeof copy, "%s", given);
    for (char *entry = strtok_r(copy, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        char *end;
        long gpu = strtol(entry, &end, 10);
        if (!strncmp(entry, "GPU-", 4) || !strncmp(entry, "MIG-", 4)) gpu = gpu_of_uuid(entry);
        else if (end == entry) return;
        if (gpu < 0 || gpu >= m->num_gpus || m->num_visible == MAX_GPUS) return;
        m->visible[m->num_visible++] = (int)gpu;
    }
}

static void read_once(void) {
    machine_t *m = &the_machine;
    const char *path = getenv("PLANNER_EMULATED_GPU");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) fail("PLANNER_EMULATED_GPU names no file that can be read:", path ? path : "");
    char line[512];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *space = strchr(line, ' ');
        if (!space) continue;
        *space = 0;
        set(m, line, space + 1);
    }
    fclose(file);
    choose_visible(m);
}

const machine_t *machine(void) {
    pthread_once(&once, read_once);
    return &the_machine;
}

// What was asked for and is not there, into the file that `log` names.
void log_line(const char *format, ...) {
    if (!*machine()->log) return;
    FILE *file = fopen(machine()->log, "a");
    if (!file) return;
    char line[512];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    fprintf(file, "%d %s\n", getpid(), line);
    fclose(file);
}
