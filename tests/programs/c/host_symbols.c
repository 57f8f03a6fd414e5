/* A program with weights as typed symbols: every one of them is read, nothing is loaded. C, and C++ as well. */

#include "host.h"

#ifdef __cplusplus
#include "model.hpp"
using namespace model;
#else
#include "model.h"
#endif

int main(void)
{
    host_count_from();
    const float *weight = host_weights(&model_encoder_weight[0][0], sizeof model_encoder_weight);
    double sum = 0;
    for (size_t i = 0; i < sizeof model_encoder_weight / sizeof(float); ++i) sum += (double)weight[i];
    for (size_t i = 0; i < sizeof model_encoder_bias / sizeof model_encoder_bias[0]; ++i) sum += model_encoder_bias[i];
    host_report(weight, sizeof model_encoder_weight, sum);
    return 0;
}
