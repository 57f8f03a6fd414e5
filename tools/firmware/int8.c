/* The quantized classifier in integers alone, as ONNX Runtime computes it, for processors that have no floating point.

   The weights are those of the converted ONNX model. Of its scales, which are floating point, archives.py made integers
   when the image was built: fixed.h and fixed.S. */

#include "board.h"
#include "digits_int8.h"
#include "fixed.h"
#include "heldout.h"

enum { SIDE = 8, PIXELS = SIDE * SIDE, FIRST = 64, SECOND = 32, CLASSES = 10 };

static uint8_t pixels[PIXELS], first[FIRST], second[SECOND], logits[CLASSES];

/* How sums become activations: times multiplier / 2^shift, plus zero. */
struct scaling {
    int32_t multiplier, shift, zero;
};

/* The nearest integer, of two the even one, as IEEE's rounding has it; then the range of uint8. The multiplier has 24
   bits, a sum fewer than 32, so the product fits. */
static uint8_t scaled(int32_t sum, struct scaling by) {
    const int64_t product = (int64_t)sum * by.multiplier, half = (int64_t)1 << (by.shift - 1);
    int64_t value = (product + half) >> by.shift; /* of a negative number, too: gcc and clang say so */
    if (((product + half) & (2 * half - 1)) == 0) value &= ~(int64_t)1;
    value += by.zero;
    if (value < 0) return 0;
    return value > 255 ? 255 : (uint8_t)value;
}

/* A layer; the ReLU, where there is one, is the lower end of the range. */
static void dense(uint32_t inputs, uint32_t outputs, const int8_t weight[outputs][inputs], const int32_t bias[],
                  int32_t zero, const uint8_t in[], struct scaling by, uint8_t out[]) {
    for (uint32_t o = 0; o < outputs; o++) {
        int32_t sum = bias[o];
        for (uint32_t i = 0; i < inputs; i++) sum += weight[o][i] * (in[i] - zero);
        out[o] = scaled(sum, by);
    }
}

static uint32_t classify(const uint8_t image[SIDE][SIDE]) {
    const struct scaling to_first = {fixed_features_0_multiplier, fixed_features_0_shift, fixed_features_0_zero_point};
    const struct scaling to_second = {fixed_features_2_multiplier, fixed_features_2_shift, fixed_features_2_zero_point};
    const struct scaling to_logits = {fixed_classifier_multiplier, fixed_classifier_shift, fixed_classifier_zero_point};
    for (uint32_t i = 0; i < PIXELS; i++) pixels[i] = fixed_grey[image[i / SIDE][i % SIDE]];
    dense(PIXELS, FIRST, digits_int8_features_0_weight_quantized, digits_int8_features_0_bias_quantized,
          fixed_grey_zero_point, pixels, to_first, first);
    dense(FIRST, SECOND, digits_int8_features_2_weight_quantized, digits_int8_features_2_bias_quantized,
          to_first.zero, first, to_second, second);
    dense(SECOND, CLASSES, digits_int8_classifier_weight_quantized, digits_int8_classifier_bias_quantized,
          to_second.zero, second, to_logits, logits);
    uint32_t best = 0;
    for (uint32_t i = 1; i < CLASSES; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}

int main(void) {
    const uint32_t count = sizeof heldout_images / sizeof heldout_images[0];
    uint32_t ticks = 0;
    board_calibrate();
    for (uint32_t number = 0; number < count; number++) {
        const uint32_t start = board_ticks();
        const uint32_t class = classify(heldout_images[number]);
        ticks += board_ticks() - start;
        board_text("class ");
        board_decimal(number);
        board_text(" ");
        board_decimal(class);
        for (uint32_t i = 0; i < CLASSES; i++) {
            board_text(" ");
            board_hex(logits[i]);
        }
        board_text("\n");
    }
    board_sum("ticks inference", ticks, count);
    board_value("stack", board_stack());
    return 0;
}
