/* Prints what a program gets from zcrecord.h: elements by typed accessors and strides, the tree in its order, values of
 * attributes as C's own types. The archive is the file named on the command line. */
#include "zcrecord.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static void print_value(const zcr_attribute *at, uint32_t i)
{
    int truth;
    int64_t integer;
    uint64_t number;
    double real;
    const char *text;
    const unsigned char *data;
    uint32_t size;
    size_t nbytes, k;
    if (!zcr_bool_value(at, i, &truth)) printf(" %s", truth ? "True" : "False");
    else if (!zcr_int_value(at, i, &integer)) printf(" %" PRId64, integer);
    else if (!zcr_uint_value(at, i, &number)) printf(" %" PRIu64, number);
    else if (!zcr_float_value(at, i, &real)) printf(" %.17g", real);
    else if (!zcr_text_value(at, i, &text, &size)) {
        printf(" text:");
        for (k = 0; k < size; k++) printf("%02x", (unsigned char)text[k]);
        if (text[size]) abort();
    } else if (!zcr_bytes_value(at, i, &data, &nbytes)) {
        printf(" bytes:");
        for (k = 0; k < nbytes; k++) printf("%02x", data[k]);
    } else printf(" None");
}

static void print_element(const zcr_tensor *t, const unsigned char *p, size_t i)
{
    const char *text;
    size_t size;
    if (t->bits && t->bits < 8) {
        if (t->dtype == ZCR_INT4 || t->dtype == ZCR_INT2) printf(" %d", zcr_packed_signed(t->first, t->bits, i));
        else printf(" %u", zcr_packed(t->first, t->bits, i));
    } else if (t->dtype == ZCR_STRING) {
        if (zcr_string(t, i, &text, &size)) abort();
        printf(" '%.*s'", (int)size, text);
    } else if (t->dtype == ZCR_FLOAT32) printf(" %g", (double)*(const float *)(const void *)p);
    else if (t->dtype == ZCR_UINT8) printf(" %u", *p);
    else printf(" ?");
}

/* By recursion over the axes: the element's address from strides, its number in C order beside it. */
static void print_elements(const zcr_tensor *t, unsigned axis, const unsigned char *p, size_t *i)
{
    uint64_t k;
    if (axis == t->rank) {
        print_element(t, p, (*i)++);
        return;
    }
    for (k = 0; k < zcr_dim(t, axis); k++) {
        print_elements(t, axis + 1, p + (ptrdiff_t)k * (ptrdiff_t)zcr_stride(t, axis) * (t->bits / 8), i);
    }
}

static void print_tensor(const zcr_tensor *t)
{
    size_t i = 0;
    const char *found = zcr_data(t) ? "data" : "none";
    if (zcr_f32(t)) found = "f32";
    if (zcr_u8(t)) found = "u8";
    if (zcr_f64(t)) found = "f64";
    printf("tensor %s %s %" PRIu64 " %zu", t->name, found, zcr_count(t), t->nbytes);
    if (t->first) print_elements(t, 0, t->first, &i);
    printf("\n");
}

static void print_module(const zcr_archive *a, uint32_t number, int ordered)
{
    zcr_children walk;
    zcr_child child;
    uint32_t order[1024], i;
    if (ordered ? zcr_walk_ordered(a, number, order, sizeof order, &walk) : zcr_walk(a, number, &walk)) abort();
    while (!zcr_next(&walk, &child)) {
        if (child.kind == ZCR_CHILD_TENSOR) print_tensor(&child.tensor);
        if (child.kind == ZCR_CHILD_ATTRIBUTE) {
            printf("attribute %s.%s", walk.module.name, child.attribute.name);
            for (i = 0; i < child.attribute.count; i++) print_value(&child.attribute, i);
            printf("\n");
        }
        if (child.kind == ZCR_CHILD_MODULE) {
            printf("module %s %s\n", child.module.name, child.module.type_name);
            print_module(a, child.module.number, ordered);
        }
    }
}

int main(int argc, char **argv)
{
    FILE *const file = argc >= 2 ? fopen(argv[1], "rb") : NULL;
    const size_t room = 1 << 20;
    uint64_t *const memory = (uint64_t *)malloc(room * 2);
    unsigned char *const data = (unsigned char *)memory;
    uint32_t scratch[1024], crc;
    const unsigned char *payload;
    zcr_archive a;
    zcr_tensor t;
    zcr_module m;
    size_t size, nbytes;
    unsigned i;
    if (!file || !memory) return 2;
    size = fread(data, 1, room, file);
    fclose(file);
    if (zcr_open_prefix(&a, data, ZCR_ANY_SIZE) || zcr_open_suffix(&a, data, size)) return 3;
    if (zcr_open(&a, data, size)) return 3;
    if (zcr_verify(&a, scratch, sizeof scratch) || zcr_verify_payloads(&a, scratch, sizeof scratch)) return 4;
    print_module(&a, 0, argc > 2); /* a second argument: by a list of the children */
    /* What is not there, of another type, or not where it should be. */
    if (zcr_get(&a, "nothing of this name", &t) != ZCR_NOT_FOUND) return 5;
    if (zcr_tensor_at(&a, zcr_tensor_count(&a), &t) != ZCR_NOT_FOUND) return 5;
    if (zcr_find_module(&a, "encoder.", 8, &m) != ZCR_NOT_FOUND || zcr_find_module(&a, "", 0, &m)) return 5;
    if (zcr_payload(&a, a.v[ZCR_V_PAYLOADS].count, &payload, &nbytes) != ZCR_NOT_FOUND) return 5;
    if (zcr_payload(&a, ZCR_NONE, &payload, &nbytes) != ZCR_NOT_FOUND || zcr_size(&a) != size) return 5;
    /* Sizes that go round memory: nothing is read behind the archive, or before it. */
    if (zcr_open(&a, data, ZCR_ANY_SIZE) != 14 || zcr_open(&a, data, ZCR_ANY_SIZE - 63) != 14) return 5;
    if (zcr_open_suffix(&a, data, ZCR_ANY_SIZE) != 16) return 5;
    if (zcr_open_suffix(&a, data + size, (size_t)0 - size - 8) != 16) return 5;
    if (zcr_open(&a, data + 4, size) != ZCR_MISALIGNED) return 5;
    if (zcr_open_prefix(&a, data + 1, size) != ZCR_MISALIGNED) return 5;
    if (zcr_open_suffix(&a, data, size - 1) != ZCR_MISALIGNED || zcr_open_suffix(&a, data, 64) != 1) return 5;
    /* An archive of 4 GiB more: of 32 bits the greatest number stands for its size, and for one that is not known. */
    data[52] = 1;
    crc = zcr_crc32(data, 60);
    for (i = 0; i < 4; i++) data[60 + i] = (unsigned char)(crc >> 8 * i);
    if (zcr_open(&a, data, ZCR_ANY_SIZE) != 14 || zcr_open(&a, data, size) != 14) return 5;
    if (zcr_open_prefix(&a, data, size) != 15) return 5;
    if (zcr_kind(1) != ZCR_KIND_NOT_AN_ARCHIVE || zcr_kind(73) != ZCR_KIND_INTEGRITY) return 6;
    if (zcr_kind(ZCR_SCRATCH) != ZCR_KIND_SCRATCH || zcr_kind(38) != ZCR_KIND_FORMAT) return 6;
    free(memory);
    return 0;
}
