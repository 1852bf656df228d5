/* Loaded before the C library (LD_PRELOAD): counts a process's calls that change files under one folder, or force them
 * to disk, or lock them, and does something at the N-th: kills the process, interrupts it, or lets the disk be full, or
 * read-only, from there on. Armed by calls_arm(), so that a process may prepare in peace.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, INTERRUPT, FULL, READ_ONLY };
enum { GROWS = 1, CHANGES = 2, OTHER = 4 }; /* needs space; changes without needing any; neither */

static char root[PATH_MAX];
static size_t root_length;
static int action;
static long at;
static atomic_long seen;

void calls_arm(const char *folder, int what, long number) {
    snprintf(root, sizeof root, "%s", folder);
    action = what;
    at = number;
    atomic_store(&seen, 0);
    root_length = strlen(root);
}

long calls_seen(void) { return atomic_load(&seen); }

static int inside(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int of_descriptor(int descriptor, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static int is_ours(int folder, const char *path) {
    char base[PATH_MAX], whole[2 * PATH_MAX + 2];
    if (!root_length || !path) return 0;
    if (path[0] == '/') return inside(path);
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else if (!of_descriptor(folder, base)) return 0;
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return inside(whole);
}

static int is_open_on_ours(int descriptor) {
    char path[PATH_MAX];
    return root_length && of_descriptor(descriptor, path) && inside(path);
}

/* Counts one call; nonzero: it fails, and errno says with what. */
static int met(int kind) {
    long number = atomic_fetch_add(&seen, 1);
    if (action == KILL && number == at) kill(getpid(), SIGKILL);
    if (action == INTERRUPT && number == at) kill(getpid(), SIGINT);
    if (action == FULL && number >= at && kind == GROWS) return errno = ENOSPC;
    if (action == READ_ONLY && number >= at && kind != OTHER) return errno = EROFS;
    return 0;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Interrupts the process at the file that the environment names by number, counted from the command's first module. */
static void count_opening(const char *path) {
    static atomic_long opened = -1;
    static const char *number;
    if (strstr(path, "/__main__.")) { /* the interpreter opens it more than once */
        number = getenv("CALLS_INTERRUPT_AT_OPENING");
        atomic_store(&opened, 0);
        return;
    }
    if (atomic_load(&opened) < 0) return;
    if (number && atomic_fetch_add(&opened, 1) == atol(number)) kill(getpid(), SIGINT);
}

#define OPEN(name, parameters, folder, ...) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        count_opening(path); \
        if ((flags & (O_ACCMODE | O_CREAT | O_TRUNC)) && is_ours(folder, path)) \
            if (met(flags & O_CREAT ? GROWS : CHANGES)) return -1; \
        return real(__VA_ARGS__, flags, mode); \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path)

#define ON_PATH(name, kind, parameters, folder, path, ...) \
    int name parameters { \
        REAL(name); \
        if (is_ours(folder, path) && met(kind)) return -1; \
        return real(__VA_ARGS__); \
    }
ON_PATH(mkdir, GROWS, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(mkdirat, GROWS, (int folder, const char *path, mode_t mode), folder, path, folder, path, mode)
ON_PATH(rmdir, CHANGES, (const char *path), AT_FDCWD, path, path)
ON_PATH(unlink, CHANGES, (const char *path), AT_FDCWD, path, path)
ON_PATH(unlinkat, CHANGES, (int folder, const char *path, int flags), folder, path, folder, path, flags)
ON_PATH(rename, CHANGES, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(renameat, CHANGES, (int a, const char *from, int b, const char *to), b, to, a, from, b, to)
ON_PATH(link, GROWS, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(linkat, GROWS, (int a, const char *from, int b, const char *to, int flags), b, to, a, from, b, to, flags)
ON_PATH(symlink, GROWS, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(chmod, CHANGES, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(truncate, CHANGES, (const char *path, off_t size), AT_FDCWD, path, path, size)

#define ON_DESCRIPTOR(type, name, kind, parameters, ...) \
    type name parameters { \
        REAL(name); \
        if (is_open_on_ours(descriptor) && met(kind)) return -1; \
        return real(__VA_ARGS__); \
    }
ON_DESCRIPTOR(ssize_t, write, GROWS, (int descriptor, const void *data, size_t size), descriptor, data, size)
ON_DESCRIPTOR(ssize_t, pwrite, GROWS, (int descriptor, const void *data, size_t size, off_t at_), descriptor, data, size, at_)
ON_DESCRIPTOR(ssize_t, writev, GROWS, (int descriptor, const struct iovec *data, int count), descriptor, data, count)
ON_DESCRIPTOR(int, fsync, OTHER, (int descriptor), descriptor)
ON_DESCRIPTOR(int, fdatasync, OTHER, (int descriptor), descriptor)
ON_DESCRIPTOR(int, ftruncate, CHANGES, (int descriptor, off_t size), descriptor, size)
ON_DESCRIPTOR(int, ftruncate64, CHANGES, (int descriptor, off_t size), descriptor, size)
ON_DESCRIPTOR(int, fchmod, CHANGES, (int descriptor, mode_t mode), descriptor, mode)
ON_DESCRIPTOR(int, flock, OTHER, (int descriptor, int how), descriptor, how)

ssize_t sendfile(int descriptor, int from, off_t *offset, size_t size) {
    static ssize_t (*real)(int, int, off_t *, size_t);
    if (!real) real = (ssize_t (*)(int, int, off_t *, size_t))dlsym(RTLD_NEXT, "sendfile");
    if (is_open_on_ours(descriptor) && met(GROWS)) return -1;
    return real(descriptor, from, offset, size);
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *stream) {
    REAL(fwrite);
    if (is_open_on_ours(fileno(stream)) && met(GROWS)) return 0;
    return real(data, size, count, stream);
}
