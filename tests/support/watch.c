/* Loaded before the C library (LD_PRELOAD): writes down which hosts a process and its children look up or connect to,
 * and which files they open to write or which folders they make, one a line, into the file that WATCHED names. No
 * look-up finds anything.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void note(const char *what, const char *name) {
    static int (*real_open)(const char *, int, ...);
    const char *log = getenv("WATCHED");
    char line[PATH_MAX + 64];
    if (!log || !name) return;
    if (!real_open) real_open = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    int descriptor = real_open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0) return;
    int length = snprintf(line, sizeof line, "%s %s\n", what, name);
    if (write(descriptor, line, length) != length) abort();
    close(descriptor);
}

/* A path as it is from the root. */
static void note_file(int folder, const char *path) {
    char base[PATH_MAX], link[64], whole[2 * PATH_MAX + 2];
    if (!path || path[0] == '/') {
        note("file", path);
        return;
    }
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, base, sizeof base - 1);
    base[length < 0 ? 0 : length] = 0;
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    note("file", whole);
}

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    (void)service, (void)hints, (void)found;
    note("host", host);
    return EAI_NONAME;
}

struct hostent *gethostbyname(const char *host) {
    note("host", host);
    return NULL;
}

int connect(int socket_, const struct sockaddr *address, socklen_t length) {
    REAL(connect);
    if (address->sa_family != AF_UNIX) note("host", "an address");
    return real(socket_, address, length);
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
        if (flags & (O_ACCMODE | O_CREAT)) note_file(folder, path); \
        return real(__VA_ARGS__, flags, mode); \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name); \
        if (strpbrk(mode, "wa+")) note_file(AT_FDCWD, path); \
        return real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    note_file(AT_FDCWD, path);
    return real(path, mode);
}
