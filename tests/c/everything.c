/* Calls every function of zcrecord.h, without a libc: what this object leaves undefined, the header needs. The answer's
 * highest bit is set where the archive is refused; the rest says why, or is a sum of what was read. */
#include "zcrecord.h"

extern uint32_t everything(const void *data, size_t size, void *scratch, size_t scratch_size);
extern uint32_t of_tensor(const zcr_tensor *t);
extern uint32_t of_attribute(const zcr_attribute *at);
extern uint32_t of_modules(const zcr_archive *a, void *scratch, size_t scratch_size);

uint32_t of_tensor(const zcr_tensor *t)
{
    uint32_t sum = (uint32_t)zcr_count(t) + zcr_number(t) + zcr_parent(t) + zcr_place(t) + zcr_key_size(t);
    const uint64_t one = 1;
    const unsigned char *payload = NULL;
    const char *text = NULL;
    size_t size = 0;
    unsigned axis;
    for (axis = 0; axis < t->rank; axis++) {
        sum += (uint32_t)zcr_dim(t, axis) + (uint32_t)zcr_stride(t, axis);
    }
    sum += zcr_payload_number(t) + (uint32_t)zcr_is_contiguous(t) + (uint32_t)t->nbytes;
    sum += (uint32_t)zcr_payload_bytes(t) + (uint32_t)zcr_has_shape(t, 1, &one) + (uint32_t)zcr_key(t)[0];
    if (!zcr_payload(t->archive, zcr_payload_number(t), &payload, &size)) sum += *payload;
    sum += (zcr_data(t) ? 1u : 0u) + (zcr_strided_data(t) ? 2u : 0u);
    if (zcr_bool(t)) sum += *zcr_bool(t);
    if (zcr_u8(t)) sum += *zcr_u8(t);
    if (zcr_i8(t)) sum += *zcr_i8(t) < 0 ? 1u : 2u;
    if (zcr_u16(t)) sum += *zcr_u16(t);
    if (zcr_i16(t)) sum += *zcr_i16(t) < 0 ? 1u : 2u;
    if (zcr_u32(t)) sum += (uint32_t)*zcr_u32(t);
    if (zcr_i32(t)) sum += (uint32_t)*zcr_i32(t);
    if (zcr_u64(t)) sum += (uint32_t)*zcr_u64(t);
    if (zcr_i64(t)) sum += (uint32_t)*zcr_i64(t);
    if (zcr_f16(t)) sum += *zcr_f16(t);
    if (zcr_bf16(t)) sum += *zcr_bf16(t);
    if (zcr_f32(t)) sum += 32;
    if (zcr_c64(t)) sum += 64;
    if (sizeof(double) == 8 && (zcr_f64(t) || zcr_c128(t))) sum ^= 0;
    if (t->first && t->bits && t->bits < 8) {
        sum += zcr_packed(t->first, t->bits, 0) + (uint32_t)zcr_packed_signed(t->first, t->bits, 0);
    }
    if (!zcr_string(t, 0, &text, &size)) sum += (uint32_t)size;
    return sum;
}

uint32_t of_attribute(const zcr_attribute *at)
{
    const unsigned char *data = NULL;
    const char *text = NULL;
    uint32_t size = 0, sum = 0, i;
    size_t nbytes = 0;
    int64_t integer;
    uint64_t number;
    double real = 0;
    int truth;
    for (i = 0; i < at->count; i++) {
        sum += (uint32_t)zcr_word(at, i);
        if (!zcr_bool_value(at, i, &truth)) sum += (uint32_t)truth;
        if (!zcr_int_value(at, i, &integer)) sum += (uint32_t)integer;
        if (!zcr_uint_value(at, i, &number)) sum += (uint32_t)number;
        if (sizeof real == 8 && !zcr_float_value(at, i, &real)) sum ^= 0;
        if (!zcr_text_value(at, i, &text, &size)) sum += size;
        if (!zcr_bytes_value(at, i, &data, &nbytes)) sum += (uint32_t)nbytes;
    }
    return sum;
}

uint32_t of_modules(const zcr_archive *a, void *scratch, size_t scratch_size)
{
    zcr_module m;
    zcr_tensor t;
    zcr_attribute at;
    zcr_children walk;
    zcr_child child;
    uint32_t i, k, sum = 0;
    for (i = 0; i < zcr_module_count(a); i++) {
        if (zcr_module_at(a, i, &m) || zcr_find_module(a, m.name, (size_t)m.name_size, &m)) continue;
        for (k = 0; !zcr_module_tensor(&m, k, &t); k++) sum += of_tensor(&t);
        if (!zcr_find_attribute(&m, "x", 1, &at)) sum += of_attribute(&at);
        if (zcr_walk(a, i, &walk)) continue;
        while (!zcr_next(&walk, &child)) sum += child.kind;
        if (zcr_walk_ordered(a, i, scratch, scratch_size, &walk)) continue;
        while (!zcr_next(&walk, &child)) sum += child.kind;
    }
    for (i = 0; i < zcr_attribute_count(a); i++) {
        if (!zcr_attribute_at(a, i, &at)) sum += of_attribute(&at);
    }
    for (i = 0; i < zcr_metadata_count(a); i++) {
        if (!zcr_metadata_at(a, i, &at)) sum += of_attribute(&at);
    }
    if (!zcr_find_metadata(a, "x", 1, &at)) sum += of_attribute(&at);
    return sum;
}

uint32_t everything(const void *data, size_t size, void *scratch, size_t scratch_size)
{
    zcr_archive a;
    zcr_tensor t;
    uint32_t i, sum = 0;
    zcr_status status = zcr_open(&a, data, size);
    if (status) status = zcr_open_prefix(&a, data, size);
    if (status) status = zcr_open_suffix(&a, data, size);
    if (!status && zcr_verify_scratch(&a) > scratch_size) status = ZCR_SCRATCH;
    if (!status) status = zcr_verify(&a, scratch, scratch_size);
    if (!status) status = zcr_verify_payloads(&a, scratch, scratch_size);
    if (status) return 0x80000000u | (uint32_t)zcr_explain(status)[0] << 16 | zcr_kind(status) << 8 | status;
    for (i = 0; i < zcr_tensor_count(&a); i++) {
        if (!zcr_tensor_at(&a, i, &t)) sum += of_tensor(&t);
        if (!zcr_tensor_sorted(&a, i, &t)) sum += of_tensor(&t);
        if (!zcr_find(&a, t.name, (size_t)t.name_size, &t)) sum += of_tensor(&t);
        if (!zcr_get(&a, t.name, &t)) sum += of_tensor(&t);
    }
    sum += of_modules(&a, scratch, scratch_size) + zcr_alignment(&a) + (uint32_t)zcr_size(&a);
    return sum & 0x7FFFFFFFu;
}
