/* What the host programs share: they count allocations, use weights, tell where those lie, and wait. */
#ifndef HOST_H
#define HOST_H

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Forgets what has been allocated so far. */
void host_count_from(void);

/* Prints, as a line of JSON, what was allocated since, where the weights lie, and the sum; then waits for the end of
 * standard input. */
void host_report(const void *weights, size_t nbytes, double sum);

#ifdef __cplusplus
}
#endif

/* The deliberate copy of -DHOST_COPY: what the measurements have to notice. */
static inline const float *host_weights(const float *weights, size_t nbytes)
{
#if defined(HOST_COPY) && defined(__cplusplus)
    return static_cast<const float *>(memcpy(operator new(nbytes), weights, nbytes));
#elif defined(HOST_COPY)
    void *copy = malloc(nbytes);
    if (copy == NULL) abort();
    return (const float *)memcpy(copy, weights, nbytes);
#else
    (void)nbytes;
    return weights;
#endif
}

#endif
