/* The classifier with its weights as typed symbols: no archive, no parser, no copy on the device, only addresses.

   digits.h and digits.S come from `zcrecord embed digits.zcr --lang c`, heldout.h and heldout.S likewise. */

#include "board.h"
#include "digits.h"
#include "heldout.h"
#include "network.h"

static const struct network network = {
    .scale = &digits_scale,
    .first_weight = digits_features_0_weight,
    .first_bias = digits_features_0_bias,
    .second_weight = digits_features_2_weight,
    .second_bias = digits_features_2_bias,
    .classifier_weight = digits_classifier_weight,
    .classifier_bias = digits_classifier_bias,
};

int main(void) {
    board_calibrate();
    network_report(&network, sizeof heldout_images / sizeof heldout_images[0], heldout_images);
    board_value("stack", board_stack());
    return 0;
}
