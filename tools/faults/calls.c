/* Loaded before the C library, it counts the calls by which a process works on files, and has one of them fail, do half
 * of its work, or be the process's last.
 *
 * What it does, and from when on, is told by fault_plan(); until then, and after fault_stop(), all calls go through.
 * Calls that the C library makes itself do not come by here. The prototypes are of its own making: what is returned as
 * a long arrives as the int or the pointer that the caller expects, on the 64-bit systems that this is for.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/uio.h>

enum mode { COUNT, FAIL_ONE, FAIL_FROM, FULL_FROM, SHORT, KILL, KILL_HALFWAY };

static atomic_int armed, calls;
static int mode, at, error;
static char last[32];

void fault_plan(int mode_, int at_, int error_);
int fault_stop(void);
const char *fault_last(void);

void fault_plan(int mode_, int at_, int error_) {
    mode = mode_, at = at_, error = error_;
    last[0] = 0;
    calls = 0;
    armed = 1;
}

/* Returns how many calls were made. */
int fault_stop(void) {
    armed = 0;
    return calls;
}

/* Returns which call the fault hit; empty if none was. */
const char *fault_last(void) { return last; }

/* Returns the error that this call is to fail with, or 0; `writes` tells whether a full disk would refuse it. */
static int fault(const char *name, int writes) {
    if (!armed || (mode == FULL_FROM && !writes)) return 0;
    int number = ++calls;
    int hit = mode == FAIL_FROM || mode == FULL_FROM ? number >= at : number == at;
    if (!hit || mode == COUNT || mode == SHORT) return 0;
    if (!last[0]) strncpy(last, name, sizeof last - 1);
    if (mode == KILL_HALFWAY && writes == 2) return 0;
    if (mode == KILL || mode == KILL_HALFWAY) raise(SIGKILL);
    return error;
}

/* Returns how many of the bytes are to be read or written. */
static unsigned long some(unsigned long nbytes) {
    int half = armed && (mode == SHORT || (mode == KILL_HALFWAY && calls == at));
    return half && nbytes > 1 ? nbytes / 2 : nbytes;
}

static void end_halfway(void) {
    if (armed && mode == KILL_HALFWAY && calls == at) raise(SIGKILL);
}

#define REAL(name, parameters)             \
    static long(*real) parameters;         \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

/* Under a name of our own, since the system's headers declare it otherwise. */
#define DEFINED(name, parameters)               \
    long our_##name parameters __asm__(#name);  \
    long our_##name parameters

#define CALL(name, writes, parameters, arguments)  \
    DEFINED(name, parameters) {                    \
        REAL(name, parameters);                    \
        int failed = fault(#name, writes);         \
        if (!failed) return real arguments;        \
        errno = failed;                            \
        return -1;                                 \
    }

/* These return what others leave in errno. */
#define CALL_ERROR(name, writes, parameters, arguments)   \
    DEFINED(name, parameters) {                           \
        REAL(name, parameters);                           \
        int failed = fault(#name, writes);                \
        return failed ? failed : real arguments;          \
    }

#define CALL_SOME(name, writes, parameters, arguments)    \
    DEFINED(name, parameters) {                           \
        REAL(name, parameters);                           \
        int failed = fault(#name, writes);                \
        if (failed) {                                     \
            errno = failed;                               \
            return -1;                                    \
        }                                                 \
        nbytes = some(nbytes);                            \
        long done = real arguments;                       \
        if (writes) end_halfway();                        \
        return done;                                      \
    }

#define BOTH(CALL_, name, writes, parameters, arguments) \
    CALL_(name, writes, parameters, arguments) CALL_(name##64, writes, parameters, arguments)

typedef const char *text;

CALL_SOME(write, 2, (int fd, const void *from, unsigned long nbytes), (fd, from, nbytes))
CALL_SOME(read, 0, (int fd, void *to, unsigned long nbytes), (fd, to, nbytes))
BOTH(CALL_SOME, pwrite, 2, (int fd, const void *from, unsigned long nbytes, long offset), (fd, from, nbytes, offset))
BOTH(CALL_SOME, pread, 0, (int fd, void *to, unsigned long nbytes, long offset), (fd, to, nbytes, offset))
CALL_SOME(copy_file_range, 2, (int from, long *at_from, int to, long *at_to, unsigned long nbytes, unsigned flags),
          (from, at_from, to, at_to, nbytes, flags))
CALL(ioctl, 1, (int fd, unsigned long what, void *argument), (fd, what, argument))
BOTH(CALL, open, 0, (text path, int flags, unsigned mode_), (path, flags, mode_))
BOTH(CALL, openat, 0, (int folder, text path, int flags, unsigned mode_), (folder, path, flags, mode_))
BOTH(CALL, ftruncate, 1, (int fd, long nbytes), (fd, nbytes))
BOTH(CALL, lseek, 0, (int fd, long offset, int from), (fd, offset, from))
BOTH(CALL, stat, 0, (text path, void *out), (path, out))
BOTH(CALL, lstat, 0, (text path, void *out), (path, out))
BOTH(CALL, fstat, 0, (int fd, void *out), (fd, out))
BOTH(CALL, fstatat, 0, (int fd, text path, void *out, int flags), (fd, path, out, flags))
BOTH(CALL, fcntl, 0, (int fd, int what, long argument), (fd, what, argument))
BOTH(CALL_ERROR, posix_fallocate, 1, (int fd, long offset, long nbytes), (fd, offset, nbytes))
BOTH(CALL_ERROR, posix_fadvise, 0, (int fd, long offset, long nbytes, int advice), (fd, offset, nbytes, advice))
CALL(rename, 0, (text from, text to), (from, to))
CALL(renameat, 0, (int a, text from, int b, text to), (a, from, b, to))
CALL(link, 0, (text from, text to), (from, to))
CALL(unlink, 0, (text path), (path))
CALL(unlinkat, 0, (int folder, text path, int flags), (folder, path, flags))
CALL(mkdir, 0, (text path, unsigned mode_), (path, mode_))
CALL(rmdir, 0, (text path), (path))
CALL(chmod, 0, (text path, unsigned mode_), (path, mode_))
CALL(fchmod, 0, (int fd, unsigned mode_), (fd, mode_))
CALL(chown, 0, (text path, unsigned user, unsigned group), (path, user, group))
CALL(listxattr, 0, (text path, char *out, unsigned long nbytes), (path, out, nbytes))
CALL(readlink, 0, (text path, char *out, unsigned long nbytes), (path, out, nbytes))
CALL(flock, 0, (int fd, int what), (fd, what))

/* Nothing here loses power, so no disk is waited for. */
DEFINED(fsync, (int fd)) {
    (void)fd;
    errno = fault("fsync", 1);
    return errno ? -1 : 0;
}

/* A descriptor is gone even where closing it fails. */
DEFINED(close, (int fd)) {
    REAL(close, (int));
    int failed = fault("close", 0);
    long done = real(fd);
    if (!failed) return done;
    errno = failed;
    return -1;
}

#define POINTER(name, counts, nothing, parameters, arguments)  \
    void *our_##name parameters __asm__(#name);                \
    void *our_##name parameters {                              \
        static void *(*real) parameters;                       \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);  \
        int failed = (counts) ? fault(#name, 0) : 0;           \
        if (!failed) return real arguments;                    \
        errno = failed;                                        \
        return (void *)(nothing);                              \
    }

typedef unsigned long size;
POINTER(opendir, 1, 0L, (text path), (path))
/* Memory that is no file's is not a matter of files. */
POINTER(mmap, fd >= 0, -1L, (void *to, size n, int prot, int flags, int fd, long at_), (to, n, prot, flags, fd, at_))
POINTER(mmap64, fd >= 0, -1L, (void *to, size n, int prot, int flags, int fd, long at_), (to, n, prot, flags, fd, at_))

#define READING_PIECES(name)                                                                        \
    DEFINED(name, (int fd, const struct iovec *pieces, int number, long offset, int flags)) {       \
        REAL(name, (int, const struct iovec *, int, long, int));                                    \
        int failed = fault(#name, 0);                                                               \
        if (failed) {                                                                               \
            errno = failed;                                                                         \
            return -1;                                                                              \
        }                                                                                           \
        if (!number) return real(fd, pieces, number, offset, flags);                                \
        struct iovec first = *pieces;                                                               \
        first.iov_len = some(first.iov_len);                                                        \
        if (first.iov_len == pieces->iov_len) return real(fd, pieces, number, offset, flags);       \
        return real(fd, &first, 1, offset, flags);                                                  \
    }
READING_PIECES(preadv2)
READING_PIECES(preadv64v2)
