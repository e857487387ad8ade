/* To be preloaded: a volume that fails as network file systems do, below one directory and told by the environment.
 *   VOLUME_ROOT     the directory; everything outside it is left alone
 *   VOLUME_FAULTS   function:pattern:errno:count[,...]   count 0 is always, n the first n calls in each process since
 *                   the variable was changed, -n the first of every n; the pattern (fnmatch) is of the path below the root;
 *                   functions: open mkdir remove rename close fsync chmod lock link read
 *   VOLUME_LATE     while this file does not exist, a name that was looked up before it existed stays unknown
 *   VOLUME_LOG      a file that gets a line for each failure ("fault function path"), each name that was looked up in
 *                   vain ("absent path"), and each lock or hard link that was asked for ("asked function path") */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(result, name, ...) ((result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
#define REMEMBERED 256

static char unknown[REMEMBERED][PATH_MAX];
static char counted[4096];
static int used[64];

static void record(const char *what, const char *function, const char *path) {
    const char *log = getenv("VOLUME_LOG");
    char line[PATH_MAX + 64];
    int n = snprintf(line, sizeof line, "%s%s%s %s\n", what, *function ? " " : "", function, path), saved = errno;
    int fd = log ? syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666) : -1;
    if (fd >= 0) {
        if (syscall(SYS_write, fd, line, n) != n) abort();
        syscall(SYS_close, fd);
    }
    errno = saved;
}

/* The path below the root, or NULL. */
static const char *below(int directory, const char *name, char *out) {
    const char *root = getenv("VOLUME_ROOT");
    char link[64], base[PATH_MAX] = "";
    ssize_t n;
    if (!root || !*root) return NULL;
    if (!name || *name != '/') {
        if (directory == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        if ((n = readlink(link, base, sizeof base - 1)) < 0) return NULL;
        base[n] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s%s%s", base, *base && name ? "/" : "", name ? name : "") >= PATH_MAX) return NULL;
    n = strlen(root);
    if (strncmp(out, root, n) || (out[n] && out[n] != '/')) return NULL;
    return out[n] ? out + n + 1 : ".";
}

static int fails(const char *function, const char *path) {
    const char *told = getenv("VOLUME_FAULTS");
    char copy[4096], *rest = copy, *word;
    if (!told || !path) return 0;
    if (strcmp(told, counted)) {
        snprintf(counted, sizeof counted, "%s", told);
        memset(used, 0, sizeof used);
    }
    strcpy(copy, counted);
    for (int i = 0; i < 64 && (word = strsep(&rest, ",")); i++) {
        char *name = strsep(&word, ":"), *pattern = strsep(&word, ":"), *code = strsep(&word, ":");
        int count = word ? atoi(word) : 0;
        if (code && !strcmp(name, function) && !fnmatch(pattern, path, 0)) {
            int number = used[i]++;
            if (count > 0 ? number >= count : count && number % -count) continue;
            record("fault", function, path);
            return errno = atoi(code);
        }
    }
    return 0;
}

static char *remembered(const char *path) {
    for (int i = 0; i < REMEMBERED; i++)
        if (!strcmp(unknown[i], path)) return unknown[i];
    return NULL;
}
static void forget(const char *path) {
    char *found = path ? remembered(path) : NULL;
    if (found) *found = 0;
}
static int is_late(const char *path) {
    const char *late = getenv("VOLUME_LATE");
    struct stat status;
    return path && late && *late && fstatat(AT_FDCWD, late, &status, 0) && remembered(path);
}
static void look_up_failed(const char *path) {
    record("absent", "", path);
    if (!remembered(path) && remembered("")) strcpy(remembered(""), path);
}

static int opens(int directory, const char *name, int flags, mode_t mode) {
    char space[PATH_MAX];
    const char *path = below(directory, name, space);
    int fd;
    if (fails("open", path)) return -1;
    if (!(flags & O_CREAT) && is_late(path)) { errno = ENOENT; return -1; }
    fd = syscall(SYS_openat, directory, name, flags, mode);
    if (path && fd < 0 && errno == ENOENT && !(flags & O_CREAT)) look_up_failed(path);
    if (path && flags & O_CREAT) forget(path);
    return fd;
}
#define OPEN_MODE(flags) va_list more; mode_t mode = 0; va_start(more, flags); if (flags & O_CREAT) mode = va_arg(more, int); va_end(more)
int open(const char *name, int flags, ...) { OPEN_MODE(flags); return opens(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { OPEN_MODE(flags); return opens(AT_FDCWD, name, flags, mode); }
int openat(int directory, const char *name, int flags, ...) { OPEN_MODE(flags); return opens(directory, name, flags, mode); }
int openat64(int directory, const char *name, int flags, ...) { OPEN_MODE(flags); return opens(directory, name, flags, mode); }

int mkdirat(int directory, const char *name, mode_t mode) {
    char space[PATH_MAX];
    const char *path = below(directory, name, space);
    if (fails("mkdir", path)) return -1;
    forget(path);
    return syscall(SYS_mkdirat, directory, name, mode);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int directory, const char *name, int flags) {
    char space[PATH_MAX];
    return fails("remove", below(directory, name, space)) ? -1 : syscall(SYS_unlinkat, directory, name, flags);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int renameat(int from, const char *name, int to, const char *target) {
    char space[PATH_MAX];
    const char *path = below(to, target, space);
    if (fails("rename", path)) return -1;
    forget(path);
    return syscall(SYS_renameat2, from, name, to, target, 0);
}
int rename(const char *name, const char *target) { return renameat(AT_FDCWD, name, AT_FDCWD, target); }

int close(int fd) {
    char space[PATH_MAX];
    int failing = fails("close", below(fd, NULL, space)), result = syscall(SYS_close, fd);
    if (!failing) return result;
    errno = failing;
    return -1;
}
int fsync(int fd) {
    char space[PATH_MAX];
    return fails("fsync", below(fd, NULL, space)) ? -1 : syscall(SYS_fsync, fd);
}
ssize_t read(int fd, void *out, size_t size) {
    char space[PATH_MAX];
    return fails("read", below(fd, NULL, space)) ? -1 : syscall(SYS_read, fd, out, size);
}
int fchmod(int fd, mode_t mode) {
    char space[PATH_MAX];
    return fails("chmod", below(fd, NULL, space)) ? -1 : syscall(SYS_fchmod, fd, mode);
}
int fchmodat(int directory, const char *name, mode_t mode, int flags) {
    char space[PATH_MAX];
    (void)flags;
    return fails("chmod", below(directory, name, space)) ? -1 : syscall(SYS_fchmodat, directory, name, mode);
}
int chmod(const char *name, mode_t mode) { return fchmodat(AT_FDCWD, name, mode, 0); }

static int asks(const char *function, const char *path) {
    if (path) record("asked", function, path);
    return fails(function, path);
}
int flock(int fd, int operation) {
    char space[PATH_MAX];
    return asks("lock", below(fd, NULL, space)) ? -1 : syscall(SYS_flock, fd, operation);
}
static int control(int fd, int command, void *argument) {
    char space[PATH_MAX];
    int is_lock = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
    return is_lock && asks("lock", below(fd, NULL, space)) ? -1 : syscall(SYS_fcntl, fd, command, argument);
}
#define ARGUMENT(last) va_list more; void *argument; va_start(more, last); argument = va_arg(more, void *); va_end(more)
int fcntl(int fd, int command, ...) { ARGUMENT(command); return control(fd, command, argument); }
int fcntl64(int fd, int command, ...) { ARGUMENT(command); return control(fd, command, argument); }
int lockf(int fd, int command, off_t size) {
    char space[PATH_MAX];
    return asks("lock", below(fd, NULL, space)) ? -1 : REAL(int, lockf, int, int, off_t)(fd, command, size);
}
int lockf64(int fd, int command, off64_t size) { return lockf(fd, command, size); }

int linkat(int from, const char *name, int to, const char *target, int flags) {
    char space[PATH_MAX];
    return asks("link", below(to, target, space)) ? -1 : syscall(SYS_linkat, from, name, to, target, flags);
}
int link(const char *name, const char *target) { return linkat(AT_FDCWD, name, AT_FDCWD, target, 0); }
