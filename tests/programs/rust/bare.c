/* A program without a C library, that calls the reader in Rust: an entry point, the exit call, and the four functions
 * on memory that every compiler expects of a freestanding machine. The archive is in `model.inc`. */

#include <stddef.h>
#include <stdint.h>

uint64_t read_all(const unsigned char *data, size_t size, uint32_t *scratch, size_t words, int level);

static const _Alignas(64) unsigned char model[] = {
#include "model.inc"
};

void *memcpy(void *to, const void *from, size_t size) {
    for (size_t i = 0; i < size; i++) {
        ((volatile unsigned char *)to)[i] = ((const unsigned char *)from)[i];
    }
    return to;
}

void *memset(void *to, int value, size_t size) {
    for (size_t i = 0; i < size; i++) {
        ((volatile unsigned char *)to)[i] = (unsigned char)value;
    }
    return to;
}

void *memmove(void *to, const void *from, size_t size) {
    size_t back = (uintptr_t)to > (uintptr_t)from;
    for (size_t i = 0; i < size; i++) {
        size_t at = back ? size - 1 - i : i;
        ((volatile unsigned char *)to)[at] = ((const unsigned char *)from)[at];
    }
    return to;
}

int memcmp(const void *a, const void *b, size_t size) {
    const volatile unsigned char *left = a, *right = b;
    for (size_t i = 0; i < size; i++) {
        if (left[i] != right[i]) {
            return left[i] < right[i] ? -1 : 1;
        }
    }
    return 0;
}

int bcmp(const void *a, const void *b, size_t size) { return memcmp(a, b, size); }

static _Noreturn void leave(long status) {
    __asm__ volatile("syscall" : : "a"(231L), "D"(status) : "rcx", "r11", "memory");
    __builtin_unreachable();
}

/* Status 0: accepted at every level, the same sum each time. Else the broken rule, or 99: the sums differ. */
static long run(void) {
    static uint32_t scratch[4096];
    uint64_t first = read_all(model, sizeof model, scratch, 4096, 0);
    for (int level = 0; level < 5; level++) {
        uint64_t found = read_all(model, sizeof model, scratch, 4096, level);
        if (found < 1000) {
            return (long)found;
        }
        if (found != first) {
            return 99;
        }
    }
    return 0;
}

__attribute__((force_align_arg_pointer)) void _start(void) { leave(run()); }
