// What the files of the emulated runtime share. Public names are those of the CUDA Runtime API, most
// of which say in its reference which call of the driver they are (docs.nvidia.com/cuda/
// cuda-runtime-api). Handles of streams, events, graphs and pools are the driver's own.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "machine.h"

#define RUNTIME EXPORT cudaError_t

cudaError_t remember(CUresult result);  // as cudaGetLastError will say
CUresult initialise(void);
CUresult enter(void);  // makes the chosen device's primary context current

// The first error of what is done one after the other; what follows it is not done.
#define DO(call) remember(initialise() ?: (call))
#define DO_IN_CONTEXT(call) remember(enter() ?: (call))
