/* A program with a whole archive in it, opened and verified by zcrecord.h at run time. C, and C++ as well. */

#include <stddef.h>

#include "host.h"
#include "model_blob.h"
#include "zcrecord.h"

int main(void)
{
    zcr_archive archive;
    zcr_tensor weight, bias;
    uint32_t scratch[64]; /* of the stack */
    const float *weights;
    const int16_t *biases;
    double sum = 0;

    host_count_from();
    if (zcr_open_prefix(&archive, model_blob.bytes, ZCR_ANY_SIZE) != ZCR_OK) return 2;
    if (zcr_verify(&archive, scratch, sizeof scratch) != ZCR_OK) return 3;
    if (zcr_get(&archive, "encoder.weight", &weight) != ZCR_OK) return 4;
    if (zcr_get(&archive, "encoder.bias", &bias) != ZCR_OK) return 4;
    if (zcr_f32(&weight) == NULL || (biases = zcr_i16(&bias)) == NULL) return 5;
    weights = host_weights(zcr_f32(&weight), weight.nbytes);
    for (size_t i = 0; i < weight.nbytes / sizeof(float); ++i) sum += (double)weights[i];
    for (size_t i = 0; i < bias.nbytes / sizeof(int16_t); ++i) sum += biases[i];
    host_report(weights, weight.nbytes, sum);
    return 0;
}
