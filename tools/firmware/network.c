/* Inference in plain C. The activations, 416 bytes, are all the memory it needs beside the stack. */

#include "network.h"

#include "board.h"

static float pixels[PIXELS], first[FIRST], second[SECOND], logits[CLASSES];

/* out = weight * in + bias, the weights as PyTorch has them: a row for each output. */
static void dense(uint32_t inputs, uint32_t outputs, const float weight[outputs][inputs], const float bias[],
                  const float in[], float out[]) {
    for (uint32_t o = 0; o < outputs; o++) {
        float sum = bias[o];
        for (uint32_t i = 0; i < inputs; i++) sum += weight[o][i] * in[i];
        out[o] = sum;
    }
}

static void relu(uint32_t count, float values[]) {
    for (uint32_t i = 0; i < count; i++) {
        if (values[i] < 0) values[i] = 0;
    }
}

uint32_t network_classify(const struct network *n, const uint8_t image[SIDE][SIDE], float out[CLASSES]) {
    for (uint32_t i = 0; i < PIXELS; i++) pixels[i] = (float)image[i / SIDE][i % SIDE] * *n->scale;
    dense(PIXELS, FIRST, n->first_weight, n->first_bias, pixels, first);
    relu(FIRST, first);
    dense(FIRST, SECOND, n->second_weight, n->second_bias, first, second);
    relu(SECOND, second);
    dense(SECOND, CLASSES, n->classifier_weight, n->classifier_bias, second, out);
    uint32_t best = 0;
    for (uint32_t i = 1; i < CLASSES; i++) {
        if (out[i] > out[best]) best = i;
    }
    return best;
}

static uint32_t bits_of(float value) {
    const union {
        float value;
        uint32_t bits;
    } both = {value};
    return both.bits;
}

void network_report(const struct network *network, uint32_t count, const uint8_t images[][SIDE][SIDE]) {
    uint32_t ticks = 0;
    for (uint32_t number = 0; number < count; number++) {
        const uint32_t start = board_ticks();
        const uint32_t class = network_classify(network, images[number], logits);
        ticks += board_ticks() - start;
        board_text("class ");
        board_decimal(number);
        board_text(" ");
        board_decimal(class);
        for (uint32_t i = 0; i < CLASSES; i++) {
            board_text(" ");
            board_hex(bits_of(logits[i]));
        }
        board_text("\n");
    }
    board_sum("ticks inference", ticks, count);
}
