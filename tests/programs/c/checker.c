/* Answers questions about archives by zcrecord.h, in the protocol that tests/support/readers.py describes.
 *
 * Each archive is put into a block of exactly its size, so that AddressSanitizer sees one byte too far. */
#define _POSIX_C_SOURCE 200112L
#include "zcrecord.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef CHECKER_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, size) ((void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(start, size) ((void)(size))
#endif

static char *text;
static size_t text_size, text_room;

static void put(const char *format, ...)
{
    va_list arguments;
    int size;
    if (text_room - text_size < 4096) {
        text_room = text_room * 2 + 8192;
        text = (char *)realloc(text, text_room);
    }
    va_start(arguments, format);
    size = vsnprintf(text + text_size, text_room - text_size, format, arguments);
    va_end(arguments);
    text_size += (size_t)size;
}

static void put_hex(const void *data, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    const unsigned char *p = (const unsigned char *)data;
    size_t i;
    put(size ? "" : "-");
    for (i = 0; i < size; i++) {
        if (text_room - text_size < 4096) put("");
        text[text_size++] = digits[p[i] >> 4];
        text[text_size++] = digits[p[i] & 15];
    }
}

static void put_number(uint32_t number)
{
    if (number == ZCR_NONE) put("-");
    else put("%" PRIu32, number);
}

static void put_tensor(const zcr_tensor *t)
{
    const uint32_t number = zcr_payload_number(t);
    const unsigned char *payload = NULL;
    size_t nbytes = 0;
    unsigned i;
    put("tensor ");
    put_hex(t->name, t->name_size);
    put(" %u %u ", t->dtype, t->bits);
    for (i = 0; i < t->rank; i++) put("%s%" PRIu64, i ? "," : "", zcr_dim(t, i));
    put(t->rank ? " " : "- ");
    if (!t->strides) put("c");
    else if (!t->rank) put("-");
    else for (i = 0; i < t->rank; i++) put("%s%" PRId64, i ? "," : "", zcr_stride(t, i));
    if (zcr_strided_data(t)) put(" %zu", (size_t)((const unsigned char *)zcr_strided_data(t) - t->archive->base));
    else put(" -");
    if (number != ZCR_NONE && zcr_payload(t->archive, number, &payload, &nbytes)) abort();
    put(" %zu %08" PRIx32, nbytes, nbytes ? zcr_crc32(payload, nbytes) : 0);
    put(" %" PRIu32 " %" PRIu32 " %" PRIu32 "\n", zcr_parent(t), zcr_place(t), zcr_key_size(t));
}

static void put_value(const char *kind, const zcr_attribute *at)
{
    uint32_t i;
    put("%s ", kind);
    put_number(at->parent);
    put(" %" PRIu32 " ", at->place);
    put_hex(at->name, at->name_size);
    put(" %u %u ", at->type, at->form);
    if (!at->count) put("-");
    for (i = 0; i < at->count; i++) {
        const char *data = NULL;
        const unsigned char *bytes = NULL;
        uint32_t size = 0;
        size_t nbytes = 0;
        if (i) put(",");
        if (!zcr_text_value(at, i, &data, &size)) put_hex(data, size);
        else if (!zcr_bytes_value(at, i, &bytes, &nbytes)) put("%zu", nbytes);
        else put("%" PRIu64, zcr_word(at, i));
    }
    put("\n");
}

static int elements_alone; /* --elements: the answer is of those of all tensors, in C order */

static void put_elements(const zcr_tensor *t, unsigned axis, const unsigned char *p)
{
    uint64_t k;
    if (axis == t->rank) put_hex(p, t->bits / 8u);
    else for (k = 0; k < zcr_dim(t, axis); k++) {
        put_elements(t, axis + 1, p + (ptrdiff_t)k * (ptrdiff_t)zcr_stride(t, axis) * (t->bits / 8));
    }
}

static void dump(const zcr_archive *a)
{
    zcr_tensor t;
    zcr_module m;
    zcr_attribute at;
    uint32_t i;
    for (i = 0; elements_alone && !zcr_tensor_at(a, i, &t); i++) {
        put_elements(&t, 0, (const unsigned char *)zcr_strided_data(&t));
    }
    if (elements_alone) return;
    put("archive %" PRIu32 " %" PRIu32 " %zu", a->mask + 1, zcr_alignment(a), zcr_size(a));
    put(" %" PRIu32 " %" PRIu32, zcr_tensor_count(a), zcr_module_count(a));
    put(" %" PRIu32 " %" PRIu32 "\n", zcr_attribute_count(a), zcr_metadata_count(a));
    for (i = 0; !zcr_tensor_at(a, i, &t); i++) put_tensor(&t);
    if (i != zcr_tensor_count(a)) abort();
    for (i = 0; !zcr_module_at(a, i, &m); i++) {
        put("module ");
        put_hex(m.name, m.name_size);
        put(" %u ", m.kind);
        put_hex(m.type_name, m.type_name_size);
        put(" ");
        put_number(m.parent);
        put(" %" PRIu32 " %" PRIu32 " %" PRIu32 "\n", m.end, m.place, m.key_size);
    }
    if (i != zcr_module_count(a)) abort();
    for (i = 0; !zcr_attribute_at(a, i, &at); i++) put_value("attribute", &at);
    if (i != zcr_attribute_count(a)) abort();
    for (i = 0; !zcr_metadata_at(a, i, &at); i++) put_value("metadata", &at);
    if (i != zcr_metadata_count(a)) abort();
}

extern unsigned sink; /* so that no read is left out */
unsigned sink;

/* Asks what is said of a tensor twice, and for more than it has. */
static void explore_tensor(const zcr_tensor *t)
{
    const uint32_t payloads = t->archive->v[ZCR_V_PAYLOADS].count;
    const unsigned char *const data = (const unsigned char *)zcr_data(t), *payload = NULL;
    uint64_t dims[ZCR_MAX_RANK + 1];
    size_t nbytes = 0;
    unsigned k;
    for (k = 0; k < t->rank; k++) {
        dims[k] = zcr_dim(t, k);
        sink += (unsigned)dims[k] + (unsigned)zcr_stride(t, k);
    }
    dims[k] = 1;
    if (zcr_dim(t, k) || zcr_stride(t, k) || zcr_dim(t, ~0u) || zcr_stride(t, ~0u)) abort();
    if (!zcr_has_shape(t, k, dims) || zcr_has_shape(t, k + 1, dims) || (k && zcr_has_shape(t, k - 1, dims))) abort();
    for (k = 0; k < t->rank; k++) {
        dims[k] ^= 1;
        if (zcr_has_shape(t, t->rank, dims)) abort();
        dims[k] ^= 1;
    }
    if (zcr_key(t)[zcr_key_size(t)] || zcr_key(t) + zcr_key_size(t) != t->name + t->name_size) abort();
    if (t->bits && t->nbytes != (zcr_count(t) * t->bits + 7) / 8) abort();
    if (data) sink += data[0] + data[t->nbytes - 1];
    if (zcr_payload(t->archive, payloads, &payload, &nbytes) != ZCR_NOT_FOUND) abort();
    if (zcr_payload(t->archive, zcr_payload_number(t), &payload, &nbytes) ? t->first != NULL : !t->first) abort();
    if (nbytes != zcr_payload_bytes(t) || nbytes < t->nbytes) abort();
    if (nbytes) sink += payload[nbytes - 1];
}

/* Walks through a module's children with a list of them: the same ones, if verified. */
static uint32_t explore_ordered(const zcr_archive *a, uint32_t i, int verified)
{
    const size_t order_size = zcr_verify_scratch(a);
    void *const order = malloc(order_size);
    zcr_children walk, listed;
    zcr_child child, same;
    zcr_status status = zcr_walk_ordered(a, i, order, order_size, &listed);
    const size_t exact = listed.count * sizeof(uint32_t);
    uint32_t k = 0;
    if (status && verified) abort();
    if (!status) {
        zcr_walk(a, i, &walk);
        if (exact && zcr_walk_ordered(a, i, order, exact - 1, &listed) != ZCR_SCRATCH) abort();
        if (zcr_walk_ordered(a, i, order, exact, &listed)) abort();
        for (; !(status = zcr_next(&listed, &child)); k++) {
            if (zcr_next(&walk, &same) || child.kind != same.kind) abort();
            if (child.kind == ZCR_CHILD_TENSOR && child.tensor.entry != same.tensor.entry) abort();
            if (child.kind == ZCR_CHILD_MODULE && child.module.number != same.module.number) abort();
            if (child.kind == ZCR_CHILD_ATTRIBUTE && child.attribute.name != same.attribute.name) abort();
        }
        if (status == ZCR_NOT_FOUND ? k != listed.count : verified) abort();
    }
    free(order);
    return k;
}

/* Uses whatever can be reached by asking, verified or not: nothing may be read that is not the archive's. */
static void explore(const zcr_archive *a, int verified)
{
    zcr_tensor t, again;
    zcr_attribute at;
    zcr_module m;
    zcr_children walk;
    zcr_child child;
    uint32_t i, k, children = 0;
    for (i = 0; i < zcr_tensor_count(a); i++) {
        const char *string = NULL;
        size_t size = 0, j;
        if (zcr_tensor_at(a, i, &t)) continue;
        if (zcr_number(&t) != i) abort();
        if (zcr_find(a, t.name, t.name_size, &again) ? verified : again.entry != t.entry && verified) abort();
        explore_tensor(&t);
        if (zcr_is_contiguous(&t) && zcr_data(&t) != zcr_strided_data(&t)) abort();
        for (j = 0; j < 4 && !zcr_string(&t, j, &string, &size); j++) sink += size ? (unsigned)string[size - 1] : 0;
        if (t.bits && t.bits < 8 && t.first) sink += zcr_packed(t.first, t.bits, (size_t)zcr_count(&t) - 1);
        if (t.first && t.strides) { /* both ends that the strides reach */
            const unsigned char *low = t.first, *high = t.first + t.bits / 8 - 1;
            for (k = 0; k < t.rank; k++) {
                const int64_t reach = zcr_stride(&t, k) * (int64_t)(zcr_dim(&t, k) - 1) * (t.bits / 8);
                *(reach < 0 ? &low : &high) += (ptrdiff_t)reach;
            }
            sink += *low + *high;
        }
    }
    for (i = 0; i < zcr_tensor_count(a); i++) {
        if (!zcr_tensor_sorted(a, i, &t)) sink += t.rank;
    }
    if (!zcr_get(a, "w", &t)) sink += t.rank;
    for (i = 0; i < zcr_module_count(a); i++) {
        if (zcr_module_at(a, i, &m)) {
            if (verified) abort();
            continue;
        }
        if (zcr_find_module(a, m.name, m.name_size, &m) ? verified : verified && m.number != i) abort();
        if (zcr_walk(a, i, &walk)) continue;
        for (k = 0; k < 10000; k++) {
            zcr_status status = zcr_next(&walk, &child);
            if (status == ZCR_NOT_FOUND) break;
            if (status && verified) abort();
            if (status) break;
        }
        children += k;
        if (explore_ordered(a, i, verified) != k && verified) abort();
        if (!verified) continue;
        for (k = 0; k < m.attributes; k++) {
            if (zcr_attribute_at(a, m.first_attribute + k, &at)) abort();
            if (zcr_find_attribute(&m, at.name, at.name_size, &at) || at.parent != i) abort();
        }
    }
    if (verified && children != zcr_tensor_count(a) + zcr_module_count(a) - 1 + zcr_attribute_count(a)) abort();
    if (!zcr_find_metadata(a, "by", 2, &at)) sink += at.count;
    for (i = 0; i < 2; i++) {
        for (k = 0; !(i ? zcr_attribute_at(a, k, &at) : zcr_metadata_at(a, k, &at)); k++) {
            const char *string;
            const unsigned char *bytes;
            uint32_t size, j;
            size_t nbytes;
            double number;
            if (zcr_word(&at, at.count) || zcr_word(&at, ZCR_NONE)) abort();
            for (j = 0; j < at.count && j < 8; j++) {
                if (!zcr_text_value(&at, j, &string, &size)) sink += (unsigned)string[size];
                if (!zcr_bytes_value(&at, j, &bytes, &nbytes) && nbytes) sink += bytes[nbytes - 1];
                if (!zcr_float_value(&at, j, &number)) sink += number > 0;
            }
        }
    }
}

static zcr_status open_as(zcr_archive *a, const unsigned char *data, size_t size, char mode)
{
    if (mode == 'p') return zcr_open_prefix(a, data, size);
    return mode == 's' ? zcr_open_suffix(a, data, size) : zcr_open(a, data, size);
}

/* Looks one name up in an archive that is opened for it. */
static void put_looked_up(const unsigned char *data, size_t size, char mode, const char *name, uint32_t name_size)
{
    zcr_archive a;
    zcr_tensor t;
    zcr_status status = open_as(&a, data, size, mode);
    if (status) abort();
    status = zcr_find(&a, name, name_size, &t);
    if (!status) put_tensor(&t);
    else put(status == ZCR_NOT_FOUND ? "-\n" : "refused\n");
}

/* Opens, uses and checks an archive as a question asks; what it holds is then in `text`. */
static zcr_status examine(const unsigned char *data, size_t size, char mode, char level)
{
    zcr_archive a;
    zcr_status status = open_as(&a, data, size, mode);
    size_t scratch_size;
    void *scratch;
    text_size = 0;
    if (status || level == 't') return status;
    explore(&a, 0);
    if (level == 'o') return ZCR_OK;
    scratch_size = zcr_verify_scratch(&a);
    scratch = malloc(scratch_size);
    if (scratch_size && zcr_verify(&a, scratch, scratch_size - 1) != ZCR_SCRATCH) abort();
    status = zcr_verify(&a, scratch, scratch_size);
    if (!status && level == 'f') status = zcr_verify_payloads(&a, scratch, scratch_size);
    free(scratch);
    if (status) return status;
    explore(&a, 1);
    dump(&a);
    return ZCR_OK;
}

/* How far from an aligned address bytes are to start, for an archive at their end to lie aligned. */
static size_t skipped(const unsigned char *data, size_t size, char mode)
{
    return mode == 's' ? (64 - zcr_unsigned_size(data, size) % 64) % 64 : 0;
}

/* The CRC of what `examine` found. */
static uint32_t text_crc(void)
{
    return text_size ? zcr_crc32((const unsigned char *)text, text_size) : 0;
}

/* Returns a u32 of standard input; ends the program where there is none. */
static uint32_t read_size(void)
{
    unsigned char size[4];
    if (fread(size, 1, 4, stdin) != 4) exit(2);
    return (uint32_t)size[0] | (uint32_t)size[1] << 8 | (uint32_t)size[2] << 16 | (uint32_t)size[3] << 24;
}

static zcr_status check(const unsigned char *data, size_t size, const unsigned char *question, int tell)
{
    const char mode = (char)question[0];
    const zcr_status status = examine(data, size, mode, (char)question[1]);
    unsigned names = question[2] | (unsigned)question[3] << 8;
    for (; names; names--) {
        const uint32_t name_size = read_size();
        char *name = (char *)malloc(name_size + !name_size);
        if (!name || fread(name, 1, name_size, stdin) != name_size) exit(2);
        if (!status) put_looked_up(data, size, mode, name, name_size);
        free(name);
    }
    if (status) return status;
    printf("accepted %08" PRIx32 "\n", text_crc());
    if (tell) printf("%.*s\n", (int)text_size, text ? text : "");
    return ZCR_OK;
}

int main(int argc, char **argv)
{
    const int tell = argc > 1 && !strcmp(argv[1], "--dump");
    unsigned char question[4];
    elements_alone = argc > 1 && !strcmp(argv[1], "--elements");
    while (fread(question, 1, sizeof question, stdin) == sizeof question) {
        const size_t size = read_size();
        zcr_status status;
        void *block;
        unsigned char *start, *read = (unsigned char *)malloc(size + !size);
        size_t skip;
        if (!read || fread(read, 1, size, stdin) != size) return 2;
        skip = skipped(read, size, (char)question[0]);
        if (posix_memalign(&block, 64, skip + size + !size)) return 3;
        start = (unsigned char *)block + skip;
        memcpy(start, read, size);
        free(read);
        ASAN_POISON_MEMORY_REGION(block, skip / 8 * 8);
        status = check(start, size, question, tell);
        ASAN_UNPOISON_MEMORY_REGION(block, skip / 8 * 8);
        if (status) printf("refused R%u: %s\n", status, zcr_explain(status));
        free(block);
    }
    free(text);
    return 0;
}
