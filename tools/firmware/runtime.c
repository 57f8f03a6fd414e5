/* The classifier with its weights in an archive that is flashed by itself, and opened where it lies by zcrecord.h.

   A new model needs no new firmware; so the archive is checked before it is used, and one that is damaged, or absent,
   is a status like any other. Reported besides: how many instructions opening, verifying and finding take. */

#include "board.h"
#include "heldout.h"
#include "network.h"
#include "zcrecord.h"

extern const unsigned char model_partition[]; /* from board.ld; only the address is known */

enum { OPENINGS = 100, FINDINGS = 16 };

/* What verifying needs to remember: 8 bytes for each tensor, module and attribute. */
#ifndef SCRATCH_WORDS
#define SCRATCH_WORDS 256
#endif
static uint32_t scratch[SCRATCH_WORDS];

/* `outcome WHAT KIND STATUS`; below 128 the status is the number of the rule of FORMAT.md that is broken. */
static int succeeded(const char *what, zcr_status status) {
    static const char kinds[][16] = {
        [ZCR_KIND_OK] = "OK",
        [ZCR_KIND_NOT_AN_ARCHIVE] = "NOT_AN_ARCHIVE",
        [ZCR_KIND_TRUNCATED] = "TRUNCATED",
        [ZCR_KIND_VERSION] = "VERSION",
        [ZCR_KIND_INTEGRITY] = "INTEGRITY",
        [ZCR_KIND_LIMIT] = "LIMIT",
        [ZCR_KIND_FORMAT] = "FORMAT",
        [ZCR_KIND_NOT_FOUND] = "NOT_FOUND",
        [ZCR_KIND_UNSUPPORTED] = "UNSUPPORTED",
        [ZCR_KIND_MISALIGNED] = "MISALIGNED",
        [ZCR_KIND_SCRATCH] = "SCRATCH",
    };
    board_text("outcome ");
    board_text(what);
    board_text(" ");
    board_text(kinds[zcr_kind(status)]);
    board_text(" ");
    board_decimal(status);
    board_text("\n");
    return status == ZCR_OK;
}

static void measure_opening(void) {
    zcr_archive archive;
    const uint32_t start = board_ticks();
    for (uint32_t i = 0; i < OPENINGS; i++) (void)zcr_open_prefix(&archive, model_partition, ZCR_ANY_SIZE);
    board_sum("ticks open", board_ticks() - start, OPENINGS);
}

/* Find every tensor by its name, several times, since a find takes only tens of ticks. */
static void measure_finding(const zcr_archive *archive) {
    const uint32_t count = zcr_tensor_count(archive);
    uint32_t all = 0, slowest = 0;
    zcr_tensor tensor, found;
    for (uint32_t i = 0; i < count; i++) {
        if (zcr_tensor_at(archive, i, &tensor)) return;
        const uint32_t start = board_ticks();
        for (uint32_t j = 0; j < FINDINGS; j++) (void)zcr_find(archive, tensor.name, tensor.name_size, &found);
        const uint32_t ticks = board_ticks() - start;
        if (found.name != tensor.name) return;
        all += ticks;
        if (ticks > slowest) slowest = ticks;
    }
    board_value("tensors", count);
    board_sum("ticks find", all, count * FINDINGS);
    board_sum("ticks slowest", slowest, FINDINGS);
}

/* The address of a float32 tensor in C order; what it should be stands in the program, so a model of other shapes is
   refused before anything reads past its end. Sizes from the innermost axis outwards, as many as `rank`. */
static zcr_status take(const zcr_archive *archive, const char *name, uint32_t rank, uint32_t inner, uint32_t outer,
                       const float **values) {
    zcr_tensor tensor;
    const zcr_status status = zcr_get(archive, name, &tensor);
    if (status) return status;
    *values = zcr_f32(&tensor);
    if (*values == NULL || tensor.rank != rank) return ZCR_UNSUPPORTED;
    if (rank > 0 && zcr_dim(&tensor, rank - 1) != inner) return ZCR_UNSUPPORTED;
    if (rank > 1 && zcr_dim(&tensor, 0) != outer) return ZCR_UNSUPPORTED;
    board_text("address ");
    board_text(name);
    board_text(" ");
    board_hex((uint32_t)(uintptr_t)*values);
    board_text("\n");
    return ZCR_OK;
}

static zcr_status find_network(const zcr_archive *archive, struct network *network) {
    const float *weights[3] = {NULL, NULL, NULL};
    zcr_status status = take(archive, "scale", 0, 0, 0, &network->scale);
    if (!status) status = take(archive, "features.0.weight", 2, PIXELS, FIRST, &weights[0]);
    if (!status) status = take(archive, "features.0.bias", 1, FIRST, 0, &network->first_bias);
    if (!status) status = take(archive, "features.2.weight", 2, FIRST, SECOND, &weights[1]);
    if (!status) status = take(archive, "features.2.bias", 1, SECOND, 0, &network->second_bias);
    if (!status) status = take(archive, "classifier.weight", 2, SECOND, CLASSES, &weights[2]);
    if (!status) status = take(archive, "classifier.bias", 1, CLASSES, 0, &network->classifier_bias);
    network->first_weight = (const float(*)[PIXELS])weights[0];
    network->second_weight = (const float(*)[FIRST])weights[1];
    network->classifier_weight = (const float(*)[SECOND])weights[2];
    return status;
}

static int use(const zcr_archive *archive) {
    struct network network;
    measure_opening();
    measure_finding(archive);
    if (!succeeded("digits", find_network(archive, &network))) return 0;
    network_report(&network, sizeof heldout_images / sizeof heldout_images[0], heldout_images);
    return 1;
}

int main(void) {
    zcr_archive archive;
    board_calibrate();
    zcr_status status = zcr_open_prefix(&archive, model_partition, ZCR_ANY_SIZE);
    int usable = succeeded("open", status);
    if (usable) {
        const uint32_t start = board_ticks();
        status = zcr_verify(&archive, scratch, sizeof scratch);
        const uint32_t ticks = board_ticks() - start;
        board_sum("ticks verify", ticks, 1);
        /* Too many tensors to remember: then each entry is checked when it is found, and only then. */
        usable = succeeded("verify", status) || status == ZCR_SCRATCH;
    }
    usable = usable && use(&archive);
    board_value("stack", board_stack());
    if (!usable) board_text("went on without a model\n");
    return usable ? 0 : 1;
}
