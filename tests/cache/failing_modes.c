/* Preloaded into a process: modes can't be set, as on file systems that have none. */
#include <errno.h>
#include <sys/stat.h>

static int refuse(void) {
    errno = EPERM;
    return -1;
}

int chmod(const char *path, mode_t mode) { return refuse(); }
int fchmod(int descriptor, mode_t mode) { return refuse(); }
int fchmodat(int folder, const char *path, mode_t mode, int flags) { return refuse(); }
