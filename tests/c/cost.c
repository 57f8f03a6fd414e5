/* Opens and verifies the archive in a file, and prints the status and how many basic blocks that took: a count that no
 * other load of the machine changes. Compiled with -fsanitize-coverage=trace-pc, which calls the function below. */
#include "zcrecord.h"

#include <stdio.h>
#include <stdlib.h>

extern unsigned long long blocks;

#ifdef COUNTER
unsigned long long blocks;
extern void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void)
{
    blocks++;
}
#else
int main(int argc, char **argv)
{
    FILE *const file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    const size_t room = (size_t)1 << 28;
    void *const data = malloc(room);
    zcr_archive a;
    zcr_status status;
    size_t size, scratch_size;
    void *scratch;
    if (!file || !data) return 2;
    size = fread(data, 1, room, file);
    fclose(file);
    blocks = 0;
    status = zcr_open(&a, data, size);
    if (!status) {
        scratch_size = zcr_verify_scratch(&a);
        scratch = malloc(scratch_size);
        if (!scratch) return 2;
        status = zcr_verify(&a, scratch, scratch_size);
        free(scratch);
    }
    printf("%u %llu\n", status, blocks);
    free(data);
    return 0;
}
#endif
