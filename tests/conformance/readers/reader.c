/* A reader of tests/conformance in C, by zcrecord.h: cc -I zcrecord/embed tests/conformance/readers/reader.c */
#include "zcrecord.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 65536u /* the strongest: an archive lies on a multiple of its base alignment (R18) */

static void put_text(const char *text, size_t size) /* as a JSON string */
{
    size_t i;
    putchar('"');
    for (i = 0; i < size; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c < 32 || c == '"' || c == '\\') printf("\\u%04x", c);
        else putchar(c);
    }
    putchar('"');
}

static void put_hex(const unsigned char *data, size_t size)
{
    size_t i;
    for (i = 0; i < size; i++) printf("%02x", data[i]);
}

static void put_elements(const zcr_tensor *t) /* in C order */
{
    const size_t item = t->bits / 8u;
    uint64_t i, rest;
    unsigned axis;
    if (!t->strides || !t->first) {
        put_hex(t->first, t->first ? t->nbytes : 0);
        return;
    }
    for (i = 0; i < zcr_count(t); i++) {
        int64_t step = 0;
        for (rest = i, axis = t->rank; axis--; rest /= zcr_dim(t, axis))
            step += zcr_stride(t, axis) * (int64_t)(rest % zcr_dim(t, axis));
        put_hex(t->first + step * (int64_t)item, item);
    }
}

static void put_tensor(const zcr_tensor *t)
{
    unsigned axis;
    printf("{\"name\": ");
    put_text(t->name, t->name_size);
    printf(", \"dtype\": %u, \"bits\": %u, \"nbytes\": %zu, \"shape\": [", t->dtype, t->bits, t->nbytes);
    for (axis = 0; axis < t->rank; axis++) printf("%s\"%" PRIu64 "\"", axis ? ", " : "", zcr_dim(t, axis));
    printf(t->strides ? "], \"strides\": [" : "], \"strides\": null");
    for (axis = 0; t->strides && axis < t->rank; axis++) printf("%s\"%" PRId64 "\"", axis ? ", " : "", zcr_stride(t, axis));
    printf(t->strides ? "], \"offset\": " : ", \"offset\": ");
    if (t->first) printf("\"%td\"", t->first - t->archive->base);
    else printf("null");
    printf(", \"elements\": \"");
    put_elements(t);
    printf("\"");
}

/* What takes more than the tensor's own entry: its module, and the names of all tensors of its payload. */
static void put_ties(const zcr_archive *a, const zcr_tensor *t)
{
    const uint32_t payload = zcr_payload_number(t);
    zcr_module m;
    zcr_tensor other;
    uint32_t i, users = 0, written = 0;
    zcr_module_at(a, zcr_parent(t), &m);
    printf(", \"module\": ");
    put_text(m.name, m.name_size);
    printf(", \"tied\": [");
    for (i = 0; !zcr_tensor_at(a, i, &other); i++) users += zcr_payload_number(&other) == payload;
    for (i = 0; users > 1 && payload != ZCR_NONE && !zcr_tensor_at(a, i, &other); i++) {
        if (zcr_payload_number(&other) != payload) continue;
        if (written++) printf(", ");
        put_text(other.name, other.name_size);
    }
    printf("]}");
}

static void put_value(const zcr_attribute *at)
{
    uint32_t i;
    printf("\"key\": ");
    put_text(at->name, at->name_size);
    printf(", \"type\": %u, \"form\": %u, \"values\": [", at->type, at->form);
    for (i = 0; i < at->count; i++) {
        const char *text = NULL;
        const unsigned char *data = NULL;
        uint32_t size = 0;
        size_t nbytes = 0;
        if (i) printf(", ");
        if (at->type == ZCR_VALUE_NIL) printf("null");
        else if (at->type == ZCR_VALUE_BOOL) printf(zcr_word(at, i) ? "true" : "false");
        else if (at->type == ZCR_VALUE_INT) printf("\"%" PRId64 "\"", (int64_t)zcr_word(at, i));
        else if (at->type == ZCR_VALUE_UINT) printf("\"%" PRIu64 "\"", zcr_word(at, i));
        else if (at->type == ZCR_VALUE_FLOAT) printf("\"%016" PRIx64 "\"", zcr_word(at, i));
        else if (!zcr_text_value(at, i, &text, &size)) put_text(text, size);
        else if (!zcr_bytes_value(at, i, &data, &nbytes)) printf("\""), put_hex(data, nbytes), printf("\"");
    }
    printf("]}");
}

static void put_module(const zcr_archive *a, const zcr_module *m)
{
    zcr_children walk;
    zcr_child child;
    uint32_t i;
    printf("{\"name\": ");
    put_text(m->name, m->name_size);
    printf(", \"kind\": %u, \"type_name\": ", m->kind);
    put_text(m->type_name, m->type_name_size);
    printf(", \"children\": [");
    zcr_walk(a, m->number, &walk);
    for (i = 0; !zcr_next(&walk, &child); i++) {
        if (i) printf(", ");
        if (child.kind == ZCR_CHILD_TENSOR) put_text(zcr_key(&child.tensor), zcr_key_size(&child.tensor));
        else if (child.kind == ZCR_CHILD_ATTRIBUTE) put_text(child.attribute.name, child.attribute.name_size);
        else put_text(child.module.name + child.module.name_size - child.module.key_size, child.module.key_size);
    }
    printf("]}");
}

static void put_contents(const zcr_archive *a)
{
    zcr_tensor t;
    zcr_module m;
    zcr_attribute at;
    uint32_t i;
    printf(", \"tensors\": [");
    for (i = 0; !zcr_tensor_at(a, i, &t); i++) printf(i ? ", " : ""), put_tensor(&t), put_ties(a, &t);
    printf("], \"modules\": [");
    for (i = 0; !zcr_module_at(a, i, &m); i++) printf(i ? ", " : ""), put_module(a, &m);
    printf("], \"attributes\": [");
    for (i = 0; !zcr_attribute_at(a, i, &at); i++) {
        zcr_module_at(a, at.parent, &m);
        printf(i ? ", {\"module\": " : "{\"module\": ");
        put_text(m.name, m.name_size);
        printf(", ");
        put_value(&at);
    }
    printf("], \"metadata\": [");
    for (i = 0; !zcr_metadata_at(a, i, &at); i++) printf(i ? ", {" : "{"), put_value(&at);
    printf("]");
}

static void put_refusal(zcr_status status)
{
    printf("{\"accepted\": false, \"rule\": \"R%u\", \"message\": ", status);
    put_text(zcr_explain(status), strlen(zcr_explain(status)));
}

static void put_found(const zcr_archive *a, const char *names) /* each follows a tab */
{
    zcr_tensor t;
    printf(", \"tensors\": [");
    while (*names) {
        const size_t size = strcspn(++names, "\t");
        const zcr_status status = zcr_find(a, names, size, &t);
        if (status == ZCR_NOT_FOUND) printf("null");
        else if (status) put_refusal(status), printf("}");
        else put_tensor(&t), printf("}");
        if (*(names += size)) printf(", ");
    }
    printf("]");
}

static void answer(const char *level, const char *embedded, const unsigned char *data, size_t size, const char *names)
{
    zcr_archive a;
    void *scratch = NULL;
    zcr_status status = embedded[0] == 'w'   ? zcr_open(&a, data, size)
                        : embedded[0] == 'p' ? zcr_open_prefix(&a, data, size)
                                             : zcr_open_suffix(&a, data, size);
    if (!status && level[0] != 't') {
        const size_t room = zcr_verify_scratch(&a);
        scratch = malloc(room + 1);
        status = zcr_verify(&a, scratch, room);
        if (!status && level[0] == 'f') status = zcr_verify_payloads(&a, scratch, room);
    }
    if (status) {
        put_refusal(status);
    } else {
        printf("{\"accepted\": true");
        if (level[0] == 't') put_found(&a, names);
        else put_contents(&a);
    }
    printf("}\n");
    fflush(stdout);
    free(scratch);
}

int main(void)
{
    static char line[1 << 16];
    static unsigned char room[(1 << 20) + 2 * ALIGNMENT];
    unsigned char *const data = room + (ALIGNMENT - (uintptr_t)room % ALIGNMENT) % ALIGNMENT;
    while (fgets(line, sizeof line, stdin)) {
        char *embedded = line + strcspn(line, "\t") + 1, *path = embedded + strcspn(embedded, "\t") + 1;
        char *names = path + strcspn(path, "\t\n");
        const char tab = *names;
        FILE *file;
        size_t size, i, skip = 0;
        names[strcspn(names, "\n")] = 0;
        *names = 0;
        file = fopen(path, "rb");
        if (!file) return 2;
        size = fread(data, 1, 1 << 20, file);
        fclose(file);
        if (embedded[0] == 's') { /* so that the archive is aligned, and not what is before it */
            const size_t end = zcr_unsigned_size(data, size);
            uint64_t nbytes = 0;
            for (i = 8; end >= 64 && i--;) nbytes = nbytes << 8 | data[end - 16 + i];
            if (nbytes < end) skip = (size_t)(ALIGNMENT - (end - nbytes) % ALIGNMENT) % ALIGNMENT;
            memmove(data + skip, data, size);
        }
        if (tab == '\t') *names = '\t';
        answer(line, embedded, data + skip, size, tab == '\t' ? names : "");
    }
    return 0;
}
