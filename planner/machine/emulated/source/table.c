// Who holds how much of which GPU: a file in shared memory that all processes of the machine map.
//
// A process that is killed gives nothing back, so an entry counts only while its process lives: its
// pid, and the time at which that started, as pids come again (proc(5), /proc/pid/stat). One lock
// for all, which the kernel opens when its owner dies (flock(2)).
#define _GNU_SOURCE
#include "machine.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#define NUM_ENTRIES 512

typedef struct {
    int32_t pid;
    uint64_t started;
    uint64_t bytes[MAX_GPUS];
    uint8_t contexts[MAX_GPUS];
} entry_t;

typedef struct {
    uint8_t lost[MAX_GPUS], told[MAX_GPUS];
    entry_t entries[NUM_ENTRIES];
} table_t;

static table_t *table;
static int table_file = -1;
static entry_t *mine;
static pthread_mutex_t in_process = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// The 22nd field of /proc/pid/stat, in clock ticks since boot; 0 where the process is gone.
static uint64_t start_of(pid_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length > 0 ? length : 0] = 0;
    char *field = strrchr(text, ')');  // the name before may hold spaces
    if (!field || field[2] == 'Z' || field[2] == 'X') return 0;
    for (int i = 2; i < 22 && field; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

static void map_table(void) {
    table_file = open(machine()->table, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (table_file >= 0 && !ftruncate(table_file, sizeof(table_t)))
        table = mmap(NULL, sizeof(table_t), PROT_READ | PROT_WRITE, MAP_SHARED, table_file, 0);
    if (!table || table == MAP_FAILED) {
        perror("planner.machine.emulated: the table of who holds memory cannot be mapped");
        exit(1);
    }
}

static void lock(void) {
    pthread_once(&once, map_table);
    pthread_mutex_lock(&in_process);
    flock(table_file, LOCK_EX);
}

static void unlock(void) {
    flock(table_file, LOCK_UN);
    pthread_mutex_unlock(&in_process);
}

static bool lives(entry_t *entry) {
    if (entry->pid && start_of(entry->pid) != entry->started) memset(entry, 0, sizeof *entry);
    return entry->pid != 0;
}

// This process's entry. A child of fork has one of its own.
static entry_t *own(void) {
    pid_t pid = getpid();
    if (mine && mine->pid == pid) return mine;
    mine = NULL;
    for (int i = 0; i < NUM_ENTRIES && !mine; i++)
        if (!lives(&table->entries[i])) mine = &table->entries[i];
    if (mine) *mine = (entry_t){.pid = pid, .started = start_of(pid)};
    return mine;
}

static uint64_t held(const entry_t *entry, int gpu) {
    return entry->bytes[gpu] + (entry->contexts[gpu] ? machine()->gpus[gpu].context_bytes : 0);
}

static uint64_t used(int gpu) {
    uint64_t sum = 0;
    for (entry_t *e = table->entries; e < table->entries + NUM_ENTRIES; e++)
        if (e->pid && lives(e)) sum += held(e, gpu);
    return sum;
}

static uint64_t unused(int gpu) {
    const gpu_t *g = &machine()->gpus[gpu];
    uint64_t taken = used(gpu) + g->kept_bytes;
    return taken < g->memory_bytes ? g->memory_bytes - taken : 0;
}

bool take_memory(int gpu, uint64_t bytes) {
    lock();
    bool fits = bytes <= unused(gpu) && own();
    if (fits) mine->bytes[gpu] += bytes;
    unlock();
    return fits;
}

void give_memory(int gpu, uint64_t bytes) {
    lock();
    if (own()) mine->bytes[gpu] -= bytes < mine->bytes[gpu] ? bytes : mine->bytes[gpu];
    unlock();
}

bool open_context(int gpu) {
    lock();
    bool fits = machine()->gpus[gpu].context_bytes <= unused(gpu) && own();
    if (fits) mine->contexts[gpu] = 1;
    const char *notice = table->told[gpu] ? "" : machine()->gpus[gpu].notice;
    table->told[gpu] = 1;
    unlock();
    if (*notice) fprintf(stderr, "planner: %s\n", notice);
    return fits;
}

uint64_t used_memory(int gpu) {
    lock();
    uint64_t bytes = used(gpu);
    unlock();
    return bytes;
}

uint64_t free_memory(int gpu) {
    lock();
    uint64_t bytes = unused(gpu);
    unlock();
    return bytes;
}

// How many processes have a context on `gpu`; the first `limit` of them into `holders`.
int holders_of(int gpu, holder_t *holders, int limit) {
    int count = 0;
    lock();
    for (entry_t *e = table->entries; e < table->entries + NUM_ENTRIES; e++) {
        if (!e->pid || !e->contexts[gpu] || !lives(e)) continue;
        if (count < limit) holders[count] = (holder_t){e->pid, held(e, gpu)};
        count++;
    }
    unlock();
    return count;
}

void lose_gpu(int gpu) {
    lock();
    table->lost[gpu] = 1;
    unlock();
}

bool is_lost(int gpu) {
    pthread_once(&once, map_table);
    return table->lost[gpu];
}
