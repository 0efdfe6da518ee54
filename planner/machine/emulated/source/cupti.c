// CUPTI: refuses to trace, in words, as under a driver that it does not know. torch then profiles
// the host only.
#include "machine.h"

EXPORT int cuptiGetResultString(int result, const char **text) {
    *text = result ? "CUPTI_ERROR_NOT_SUPPORTED" : "CUPTI_SUCCESS";
    return 0;
}
