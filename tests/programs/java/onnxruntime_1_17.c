/* A library of the name and version that ONNX Runtime's Java binding 1.17 is linked against, which hands it another
 * one's functions: those of the file that ONNXRUNTIME_LIBRARY names. Later versions have all of 1.17's functions. */

#include <dlfcn.h>
#include <stdlib.h>

const void *OrtGetApiBase(void);
const void *OrtSessionOptionsAppendExecutionProvider_CPU(void *options, int use_arena);

const void *OrtGetApiBase(void)
{
    void *library = dlopen(getenv("ONNXRUNTIME_LIBRARY"), RTLD_NOW);
    const void *(*get)(void);

    if (library == NULL)
        abort();
    *(void **)&get = dlsym(library, "OrtGetApiBase");
    return get();
}

/* Linked against as well, and not called: the provider is there without it. */
const void *OrtSessionOptionsAppendExecutionProvider_CPU(void *options, int use_arena)
{
    (void)options;
    (void)use_arena;
    return NULL;
}
