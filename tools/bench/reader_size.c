/* The smallest program that opens an archive in flash and finds a tensor: LEVEL 0 without the reader, 1 with it, 2 with
 * the index verified before. What it takes more than at level 0 is what the reader takes. */
#include "zcrecord.h"

extern const unsigned char model[];
extern uint32_t scratch[64];
extern zcr_status use(zcr_archive *archive, const char *name, size_t name_size, zcr_tensor *tensor);

zcr_status use(zcr_archive *archive, const char *name, size_t name_size, zcr_tensor *tensor)
{
#if LEVEL
    zcr_status status = zcr_open_prefix(archive, model, ZCR_ANY_SIZE);
#if LEVEL == 2
    if (!status) status = zcr_verify(archive, scratch, sizeof scratch);
#endif
    if (!status) status = zcr_find(archive, name, name_size, tensor);
    return status;
#else
    (void)archive, (void)name, (void)name_size, (void)tensor;
    return 0;
#endif
}
