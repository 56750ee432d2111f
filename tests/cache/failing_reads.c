/* Preloaded into a process: reads from files whose path contains $FAULT_PATH fail with errno $FAULT_ERRNO, the first
   $FAULT_TIMES times. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(int descriptor) {
    static long done;
    const char *wanted = getenv("FAULT_PATH"), *number = getenv("FAULT_ERRNO"), *times = getenv("FAULT_TIMES");
    char link[64], path[4096];
    ssize_t length;
    if (!wanted || !number || !times) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, wanted) || __sync_fetch_and_add(&done, 1) >= atol(times)) return 0;
    errno = atoi(number);
    return 1;
}

ssize_t read(int descriptor, void *buffer, size_t size) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    return fails(descriptor) ? -1 : real(descriptor, buffer, size);
}

ssize_t pread64(int descriptor, void *buffer, size_t size, off64_t offset) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    return fails(descriptor) ? -1 : real(descriptor, buffer, size, offset);
}

ssize_t preadv64(int descriptor, const struct iovec *parts, int count, off64_t offset) {
    static ssize_t (*real)(int, const struct iovec *, int, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "preadv64");
    return fails(descriptor) ? -1 : real(descriptor, parts, count, offset);
}

ssize_t preadv64v2(int descriptor, const struct iovec *parts, int count, off64_t offset, int flags) {
    static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "preadv64v2");
    return fails(descriptor) ? -1 : real(descriptor, parts, count, offset, flags);
}

ssize_t pread(int descriptor, void *buffer, size_t size, off_t offset) {
    return pread64(descriptor, buffer, size, offset);
}
