// How a program ends. Autograd's threads let go of Python's objects after a backward has returned; where
// Python is ending by then, Python before 3.14 ends such a thread by pthread_exit, which unwinds C++
// that must not be unwound, and so aborts the program (python/cpython issue 87135). On a card the race
// is rarely lost; here, where kernels take no time, mostly. As Python 3.14 does, the thread waits for
// the end of the process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "machine.h"

static bool python_is_ending(void) {
    int (*ending)(void) = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");  // until 3.12
    if (!ending) ending = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    return ending && ending();
}

EXPORT __attribute__((noreturn)) void pthread_exit(void *value) {
    while (python_is_ending()) pause();
    void (*next)(void *) = dlsym(RTLD_NEXT, "pthread_exit");
    next(value);
    abort();
}
