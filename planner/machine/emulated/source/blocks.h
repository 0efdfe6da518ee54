// The blocks of memory that a process knows, for the files that make them. Names in capitals are
// the kinds; whoever reads or changes blocks holds `blocks_mutex`.
#pragma once
#include "driver.h"

typedef enum { DEVICE, MANAGED, MAPPED, POOLED, HOST, REGISTERED } kind_t;

struct CUmemPoolHandle_st {
    int device;
    uint64_t used, used_high, reserved, reserved_high, threshold;
};

typedef struct {  // physical memory of cuMemCreate
    int device, mappings;
    size_t bytes;
    bool is_released;
} physical_t;

typedef struct {
    uintptr_t begin;
    size_t bytes, mapped_bytes;
    kind_t kind;
    int device;
    uint64_t id;
    bool is_shared;
    union {
        physical_t *physical;
        CUmemoryPool pool;
    };
} block_t;

extern pthread_mutex_t blocks_mutex;
extern block_t *blocks;  // in the order of their addresses

size_t round_up(size_t bytes, size_t unit);
size_t rank_of(uintptr_t address);  // how many blocks begin at `address` or before it
block_t *block_of(const void *address);
void insert_block(block_t block);
void erase_block(block_t *block);
void *map_anonymous(void *wish, size_t bytes, int protection, int flags);
void *map_next(size_t bytes);
void free_pooled(const block_t *block);
void stop_sharing(const block_t *block);
