/* Opens the archive in a file, does what the second argument says, and prints the status and how many basic blocks that
 * took: a count that no other load of the machine changes. `verify`; `payloads`, which are verified besides; `walk` and
 * `ordered`, which go through the children of module 0. Compiled with -fsanitize-coverage=trace-pc, which calls the
 * function below. */
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
    FILE *const file = argc == 3 ? fopen(argv[1], "rb") : NULL;
    const size_t room = (size_t)1 << 28;
    void *const data = malloc(room);
    zcr_archive a;
    zcr_children walk;
    zcr_child child;
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
        if (*argv[2] == 'v' || *argv[2] == 'p') {
            status = zcr_verify(&a, scratch, scratch_size);
            if (!status && *argv[2] == 'p') status = zcr_verify_payloads(&a, scratch, scratch_size);
        } else {
            status = *argv[2] == 'o' ? zcr_walk_ordered(&a, 0, scratch, scratch_size, &walk) : zcr_walk(&a, 0, &walk);
            while (!status) status = zcr_next(&walk, &child);
        }
        free(scratch);
    }
    printf("%u %llu\n", status, blocks);
    free(data);
    return 0;
}
#endif
