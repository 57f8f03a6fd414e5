/* A program that finds the archive attached to its own file, and prints one tensor; without an argument, "ready".
 *
 *     cc -O2 -o app own_weights.c && zcrecord attach app model.zcr && ./app weight
 *
 * It knows where Linux says what file runs. Pages of weights are the kernel's own copy, shared by all that run it.
 */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "zcrecord.h"

int main(int argc, char **argv)
{
    const int file = open("/proc/self/exe", O_RDONLY);
    struct stat status;
    const void *program;
    zcr_archive archive;
    zcr_tensor tensor;
    const float *weights;
    size_t i;

    if (argc < 2) {
        puts("ready");
        return 0;
    }
    if (file < 0 || fstat(file, &status)) {
        perror("/proc/self/exe");
        return 1;
    }
    program = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (program == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    if (zcr_open_suffix(&archive, program, (size_t)status.st_size)) {
        fputs("no archive is attached to this program\n", stderr);
        return 2;
    }
    if (zcr_get(&archive, argv[1], &tensor) || (weights = zcr_f32(&tensor)) == NULL) {
        fprintf(stderr, "no float32 tensor is named %s\n", argv[1]);
        return 3;
    }
    for (i = 0; i < zcr_count(&tensor); i++) {
        printf("%g\n", (double)weights[i]);
    }
    printf("aligned to 64: %d\n", ((uintptr_t)weights & 63) == 0);
    return 0;
}
