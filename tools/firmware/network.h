/* The digits classifier in floating point: 64 pixels, two hidden layers with ReLU, 10 logits.

   It takes the weights where they are. Nothing here knows whether a linker put them there or an archive says where. */

#ifndef NETWORK_H
#define NETWORK_H

#include <stdint.h>

enum { SIDE = 8, PIXELS = SIDE * SIDE, FIRST = 64, SECOND = 32, CLASSES = 10 };

struct network {
    const float *scale; /* of one pixel */
    const float (*first_weight)[PIXELS];
    const float *first_bias;
    const float (*second_weight)[FIRST];
    const float *second_bias;
    const float (*classifier_weight)[SECOND];
    const float *classifier_bias;
};

/* Write the logits of an image, of pixels from 0 to 16; return its class, the first of the greatest. */
uint32_t network_classify(const struct network *network, const uint8_t image[SIDE][SIDE], float logits[CLASSES]);

/* Classify `count` images and report for each `class NUMBER CLASS LOGITS`, the logits as the bits of floats; then the
   ticks that classifying alone took. */
void network_report(const struct network *network, uint32_t count, const uint8_t images[][SIDE][SIDE]);

#endif
