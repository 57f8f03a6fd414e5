/* SPDX-License-Identifier: 0BSD
 *
 * zcrecord.h: reads zcrecord archives, format version 1, where they lie. Freestanding C99, or C++11: no libc, no
 * allocation, no copy of any weight. In a program without libc compile it with -ffreestanding, or GCC turns loops into
 * calls of strlen and memcpy. Numbers like R38 are rules of the format's specification, FORMAT.md.
 *
 *     alignas(64) extern const unsigned char model[];      // flash; at least on a multiple of 8
 *     const uint64_t shape[] = {64, 128};                  // what the program was written for
 *     zcr_archive archive;
 *     zcr_tensor weight;
 *     if (zcr_open_prefix(&archive, model, ZCR_ANY_SIZE)) ...
 *     if (zcr_get(&archive, "encoder.0.weight", &weight)) ...
 *     if (!zcr_has_shape(&weight, 2, shape)) ...           // before any element is read: another model has others
 *     const float *w = zcr_f32(&weight);                   // NULL unless float32, in C order, aligned, not empty
 *
 * Every function is static: whatever a file does not call is not in its object, without -ffunction-sections,
 * without a file that has to define an implementation once, and without a warning. A program that uses the reader in
 * several files and wants one copy wraps what it needs in a file of its own.
 *
 * How much is checked when:
 *   zcr_open*            what opening checks: both ends, the bounds of every vector of the index.
 *   zcr_find, zcr_get    each entry as it is touched; memory-safe whatever the archive holds.
 *   zcr_verify           every rule of the index and its CRC. Modules, attributes and metadata are to be trusted only
 *                        after it; before it their functions stay inside the archive, too, but may return nonsense,
 *                        and every name, a tensor's too, may be no UTF-8 and hold a NUL: its size is what counts. A
 *                        name that is there may not be found, or be there twice.
 *   zcr_verify_payloads  the payloads' bytes as well: digests, gaps, strings, bools.
 *
 * The archive's address is a multiple of 8, otherwise every open returns ZCR_MISALIGNED: then no field of the index is
 * read unaligned. An archive should lie on its own alignment (zcr_alignment), typed accessors look at theirs.
 *
 * What lives how long: a tensor, module, attribute or walk points to the zcr_archive that it was asked of, which stays
 * where it is, and unchanged, as long as they are used; a copy of it is another. Names and elements lie in the
 * archive's memory itself and need nothing else. That memory is only ever read, by any number of threads at a time.
 * What was checked holds for the bytes that were there: where something else writes to them meanwhile, such as another
 * process to a mapped file, neither the checks nor the bounds they gave do.
 *
 * Aliasing: to read as float what is declared as an array of unsigned char, as in the example, is undefined in C; bytes
 * without a declared type, as of a mapping, may be read so. What compilers make of that rule is to move a write through
 * one type across a read through another, so it does no harm where the program never writes to the archive. One that
 * fills such an array at run time does so before it opens the archive, and in another file than the one that reads
 * elements; with link-time optimisation, which sees through files, it is compiled with -fno-strict-aliasing.
 *
 * Copyright (c) the zcrecord authors. Permission to use, copy, modify, and/or distribute this software for any purpose
 * with or without fee is hereby granted. THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES.
 */
#ifndef ZCRECORD_H
#define ZCRECORD_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

/* Views are used as they lie, so a machine of the other byte order has no use for an archive. */
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "zcrecord archives are little-endian and used in place; this machine is not"
#endif
#elif defined(__BIG_ENDIAN__) || defined(__ARMEB__) || defined(__MIPSEB__) || defined(__sparc) || defined(__m68k__)
#error "zcrecord archives are little-endian and used in place; this machine is not"
#endif
#if CHAR_BIT != 8
#error "zcrecord archives are bytes of 8 bits"
#endif

#ifdef __cplusplus
#if defined(__GNUC__) || defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast" /* C has no others */
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant" /* some systems' NULL */
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuseless-cast" /* with a size_t or unsigned of another width it is of use */
#endif
#endif
extern "C" {
#endif

/* ---- What there is to know ------------------------------------------------------------------------------------- */

/* 0 is success; 1 to 99 the number of the rule of FORMAT.md that the archive breaks; from 128 on the other reasons.
 * zcr_kind sorts them, zcr_explain has words for them. */
typedef unsigned zcr_status;

#define ZCR_OK 0u
#define ZCR_NOT_FOUND 128u   /* no tensor, module, attribute of that name or number */
#define ZCR_UNSUPPORTED 129u /* it is there, but has another type */
#define ZCR_MISALIGNED 130u  /* the archive's address is no multiple of 8 */
#define ZCR_SCRATCH 131u     /* the memory given is too little, see zcr_verify_scratch, or not on a multiple of 4 */

enum {
    ZCR_KIND_OK,
    ZCR_KIND_NOT_AN_ARCHIVE, /* other bytes, or fewer than the smallest archive has */
    ZCR_KIND_TRUNCATED,      /* its size, or the one at its other end, is another; of status 15 perhaps not known */
    ZCR_KIND_VERSION,        /* of another version, or with a feature this reader does not know */
    ZCR_KIND_INTEGRITY,      /* a CRC or digest does not match: damaged */
    ZCR_KIND_LIMIT,          /* larger or deeper than the format allows */
    ZCR_KIND_FORMAT,         /* any other rule is broken */
    ZCR_KIND_NOT_FOUND,
    ZCR_KIND_UNSUPPORTED,
    ZCR_KIND_MISALIGNED,
    ZCR_KIND_SCRATCH
};

/* Element types; any other number is one this reader does not know, whose elements are `bits` wide all the same. */
enum {
    /* generated by tools/generate from dtypes.py: codes */
    ZCR_BOOL = 1, ZCR_UINT8 = 2, ZCR_INT8 = 3, ZCR_UINT16 = 4, ZCR_INT16 = 5, ZCR_UINT32 = 6, ZCR_INT32 = 7,
    ZCR_UINT64 = 8, ZCR_INT64 = 9,
    ZCR_FLOAT16 = 16, ZCR_BFLOAT16 = 17, ZCR_FLOAT32 = 18, ZCR_FLOAT64 = 19, ZCR_COMPLEX64 = 20, ZCR_COMPLEX128 = 21,
    ZCR_FLOAT8_E4M3FN = 32, ZCR_FLOAT8_E4M3FNUZ = 33, ZCR_FLOAT8_E5M2 = 34, ZCR_FLOAT8_E5M2FNUZ = 35,
    ZCR_FLOAT8_E8M0FNU = 36,
    ZCR_FLOAT6_E2M3FN = 48, ZCR_FLOAT6_E3M2FN = 49, ZCR_FLOAT4_E2M1FN = 50, ZCR_UINT4 = 51, ZCR_INT4 = 52,
    ZCR_UINT2 = 53, ZCR_INT2 = 54,
    ZCR_STRING = 64
    /* end */
};

enum { ZCR_MAPPING = 1, ZCR_LIST = 2, ZCR_TUPLE = 3, ZCR_OBJECT = 4, ZCR_NUMBERED = 5 }; /* kinds of modules */

enum { /* types of attributes' values */
    ZCR_VALUE_NIL, ZCR_VALUE_BOOL, ZCR_VALUE_INT, ZCR_VALUE_UINT, ZCR_VALUE_FLOAT, ZCR_VALUE_TEXT, ZCR_VALUE_BYTES
};
enum { ZCR_FORM_SCALAR, ZCR_FORM_LIST, ZCR_FORM_TUPLE };

#define ZCR_VERSION 1                   /* the format's, which this reader reads */
#define ZCR_NONE 0xFFFFFFFFu            /* no number: of a payload, of a module 0's parent */
#define ZCR_ANY_SIZE (~(size_t)0)       /* for zcr_open_prefix alone: only the address is known */
#define ZCR_MAX_RANK 64

/* Vectors of the index by their ids. The first is none; its count is that one's value. */
enum {
    ZCR_V_DIGEST_KIND, ZCR_V_TEXT, ZCR_V_DIMS, ZCR_V_STRIDES, ZCR_V_WORDS, ZCR_V_PAYLOADS, ZCR_V_TENSORS, ZCR_V_BY_NAME,
    ZCR_V_BY_MODULE, ZCR_V_MODULES, ZCR_V_ATTRIBUTES, ZCR_V_METADATA, ZCR_V_COUNT
};

/* What header and trailer say of the archive's parts, in this order. */
enum { ZCR_E_INDEX, ZCR_E_INDEX_SIZE, ZCR_E_PAYLOADS, ZCR_E_SIZE, ZCR_E_COUNT };

typedef struct zcr_vector {
    const unsigned char *items; /* of a missing one the start of the index, where no item lies */
    uint32_t count;
} zcr_vector;

/* An opened archive. Its fields are for reading by zcr_ functions; it may be copied. */
typedef struct zcr_archive {
    const unsigned char *base;
    size_t extent[ZCR_E_COUNT]; /* index_offset, index_size, payload_offset, archive_size */
    uint32_t mask;              /* alignment - 1 */
    uint32_t base_mask;         /* base alignment - 1; while opening 0 of an unsealed header, which has none */
    zcr_vector v[ZCR_V_COUNT];
} zcr_archive;

/* One tensor: what is needed to compute with it. The rest: zcr_count, zcr_dim, zcr_stride, zcr_key, zcr_parent, ... */
typedef struct zcr_tensor {
    const zcr_archive *archive;
    const unsigned char *entry;   /* in the index, where the functions read */
    const char *name;             /* followed by NUL; UTF-8 without another NUL once zcr_verify has passed */
    const unsigned char *first;   /* element [0, ..., 0]; NULL if there are no elements */
    const unsigned char *dims;    /* rank u64 */
    const unsigned char *strides; /* rank i64, or NULL: none are stored, elements lie in C order */
    size_t nbytes;                /* of the elements: at zcr_data so many may be read; of strings, with their ends */
    uint32_t name_size;
    uint8_t dtype;
    uint8_t bits; /* per element; 0 for strings */
    uint8_t rank;
} zcr_tensor;

/* ---- Loads, arithmetic, comparisons ---------------------------------------------------------------------------- */

/* Reading a struct through a cast would break C's aliasing rules, and was miscompiled in readers of this kind. GNU
 * compilers are told that these loads may alias anything, and then need one instruction for each, as they lie aligned;
 * for all others, and with ZCR_PORTABLE, they are put together from bytes. */
#if defined(__GNUC__) && !defined(ZCR_PORTABLE)
typedef uint16_t __attribute__((__may_alias__)) zcr_alias16;
typedef uint32_t __attribute__((__may_alias__)) zcr_alias32;
typedef uint64_t __attribute__((__may_alias__)) zcr_alias64;
#define ZCR_LOAD16(p) (*(const zcr_alias16 *)(const void *)(p))
#define ZCR_LOAD32(p) (*(const zcr_alias32 *)(const void *)(p))
#define ZCR_LOAD64(p) (*(const zcr_alias64 *)(const void *)(p))
/* What is called from several places is kept in one piece, and what is called from one is not: on small cores that is
 * worth a quarter of the size. */
#define ZCR_FUNCTION static __attribute__((__noinline__, __unused__))
#else
#define ZCR_LOAD16(p) ((uint16_t)((p)[0] | (unsigned)(p)[1] << 8))
#define ZCR_LOAD32(p) \
    ((uint32_t)(p)[0] | (uint32_t)(p)[1] << 8 | (uint32_t)(p)[2] << 16 | (uint32_t)(p)[3] << 24)
#define ZCR_LOAD64(p) ((uint64_t)ZCR_LOAD32(p) | (uint64_t)ZCR_LOAD32((p) + 4) << 32)
#define ZCR_FUNCTION static inline
#endif

/* Sizes and offsets are 64 bits wide in an archive. One that does not fit becomes the greatest size_t, which is larger
 * than anything that is there. */
#if SIZE_MAX >= UINT64_MAX
static inline size_t zcr_load_size(const unsigned char *p)
{
    return (size_t)ZCR_LOAD64(p);
}
#else
ZCR_FUNCTION size_t zcr_load_size(const unsigned char *p)
{
    const uint32_t low = ZCR_LOAD32(p);
    return ZCR_LOAD32(p + 4) || (size_t)low != low ? SIZE_MAX : (size_t)low;
}
#endif

static inline const unsigned char *zcr_row(const zcr_archive *a, unsigned vector, uint32_t i, unsigned item)
{
    return a->v[vector].items + (size_t)i * item;
}

/* Returns a * b, or all ones where that takes more than 64 bits; without a division, which small cores call for. */
ZCR_FUNCTION uint64_t zcr_multiply(uint64_t a, uint64_t b)
{
    const uint32_t a1 = (uint32_t)(a >> 32), a0 = (uint32_t)a, b1 = (uint32_t)(b >> 32), b0 = (uint32_t)b;
    uint64_t high;
    if (a1 && b1) {
        return UINT64_MAX;
    }
    high = (uint64_t)a1 * b0 + (uint64_t)b1 * a0 + ((uint64_t)a0 * b0 >> 32); /* one of the first two is 0 */
    return high >> 32 ? UINT64_MAX : a * b;
}

/* Returns zlib's CRC-32, computed two bits at a time: its table takes 16 bytes rather than 1024. */
ZCR_FUNCTION uint32_t zcr_crc32(const unsigned char *p, size_t size)
{
    uint32_t crc = UINT32_MAX;
    static const uint32_t table[4] = {0, 0x76DC4190, 0xEDB88320, 0x9B64C2B0};
    unsigned left;
    for (; size; size--) {
        crc ^= *p++;
        for (left = 4; left; left--) {
            crc = crc >> 2 ^ table[crc & 3];
        }
    }
    return ~crc;
}

/* Returns less than, equal to or more than 0 as the first bytes are less than, equal to or more than the others, a
 * proper prefix being less. */
ZCR_FUNCTION int zcr_compare(const unsigned char *p, size_t p_size, const unsigned char *q, size_t q_size)
{
    for (;; p++, q++, p_size--, q_size--) {
        if (!q_size) {
            return p_size != 0;
        }
        if (!p_size) {
            return -1;
        }
        if (*p != *q) {
            return *p - *q;
        }
    }
}

/* Returns the text that a Span in the index stands for; NULL if it leaves the pool, or if no NUL follows it (R27). */
ZCR_FUNCTION const unsigned char *zcr_span(const zcr_archive *a, const unsigned char *span)
{
    const uint32_t start = ZCR_LOAD32(span), size = ZCR_LOAD32(span + 4), count = a->v[ZCR_V_TEXT].count;
    const unsigned char *text = a->v[ZCR_V_TEXT].items;
    if (start >= count || size >= count - start) {
        return NULL;
    }
    text += (size_t)start;
    return text[(size_t)size] ? NULL : text;
}

/* Returns where `count` items of 8 bytes lie in a pool, NULL if they leave it. */
static inline const unsigned char *zcr_range(const zcr_archive *a, unsigned vector, uint32_t start, uint32_t count)
{
    const zcr_vector *v = &a->v[vector];
    return start > v->count || count > v->count - start ? NULL : v->items + (size_t)start * 8;
}

/* ---- Opening --------------------------------------------------------------------------------------------------- */

/* Takes in a header or trailer of `size` bytes (R1 to R12). An unsealed one leaves a base mask and extents of 0. */
ZCR_FUNCTION zcr_status zcr_read_end(zcr_archive *a, const unsigned char *p, size_t size)
{
    size_t index, index_size, payloads, end;
    uint32_t any, mask, base_mask;
    unsigned at, log2, base_log2;
    if (size < 128) {
        return 1;
    }
    if ((uintptr_t)p & 7) {
        return ZCR_MISALIGNED;
    }
    if (ZCR_LOAD32(p) != 0x52435A89u || ZCR_LOAD32(p + 4) != 0x0A1A0A0Du) {
        return 1;
    }
    if (p[8] != ZCR_VERSION) {
        return 2;
    }
    if (zcr_crc32(p, 60) != ZCR_LOAD32(p + 60)) {
        return 3;
    }
    log2 = p[9];
    if (log2 - 4 > 12) { /* less than 4 wraps */
        return 4;
    }
    a->mask = mask = ((uint32_t)1 << log2) - 1;
    any = ZCR_LOAD16(p + 10);
    for (at = 12; at < 60; at += 4) {
        any |= ZCR_LOAD32(p + at);
    }
    for (at = 0; at < ZCR_E_COUNT; at++) {
        a->extent[at] = zcr_load_size(p + 24 + 8 * at);
    }
    a->base_mask = 0;
    if (!any) {
        return ZCR_OK;
    }
    base_log2 = p[10];
    if (base_log2 < log2 || base_log2 > 16) {
        return 5;
    }
    a->base_mask = base_mask = ((uint32_t)1 << base_log2) - 1;
    if (p[11] | ZCR_LOAD32(p + 12)) {
        return 6;
    }
    if (ZCR_LOAD32(p + 16) | ZCR_LOAD32(p + 20)) {
        return 7;
    }
    index = a->extent[ZCR_E_INDEX];
    index_size = a->extent[ZCR_E_INDEX_SIZE];
    payloads = a->extent[ZCR_E_PAYLOADS];
    end = a->extent[ZCR_E_SIZE];
#if SIZE_MAX > UINT32_MAX
    if (end > (size_t)1 << 56) {
        return 9;
    }
#endif
    if (end < 128) {
        return 14;
    }
    end -= 64;
    if (index_size & 7 || !index_size || index_size >> 15 > 0xFFFF) {
        return 10;
    }
    if (payloads & mask || payloads > end) {
        return 11;
    }
    if (index == 64 && payloads - 64 >= index_size) { /* less than 64 wraps, and is refused */
        return payloads - 64 - index_size > base_mask ? 12 : ZCR_OK;
    }
    if (payloads != (mask < 64 ? 64 : mask + 1) || index < payloads || index & mask || index > end ||
        end - index != index_size) {
        return 12;
    }
    return ZCR_OK;
}

/* Returns the bytes from the first payload to the index or the trailer, whichever follows the payloads. */
static inline size_t zcr_payload_room(const zcr_archive *a)
{
    const size_t payloads = a->extent[ZCR_E_PAYLOADS], index = a->extent[ZCR_E_INDEX];
    return (index < payloads ? a->extent[ZCR_E_SIZE] - 64 : index) - payloads;
}

/* Checks what the counts of vectors say without a look at an entry (R24, R25, R37), and where payloads end (R13). */
ZCR_FUNCTION zcr_status zcr_check_counts(const zcr_archive *a)
{
    const zcr_vector *const v = a->v;
    const uint32_t count = v[ZCR_V_TENSORS].count;
    size_t region;
    if (v[ZCR_V_BY_NAME].count != count ||
        (v[ZCR_V_BY_MODULE].count != count && v[ZCR_V_BY_MODULE].items != a->base + a->extent[ZCR_E_INDEX])) {
        return 24;
    }
    if (v[ZCR_V_DIGEST_KIND].count > 1) {
        return 25;
    }
    if (!v[ZCR_V_MODULES].count) {
        return 37;
    }
    region = zcr_payload_room(a);
    if (region & a->mask) {
        return 13;
    }
    if (v[ZCR_V_PAYLOADS].count) {
        const unsigned char *last = zcr_row(a, ZCR_V_PAYLOADS, v[ZCR_V_PAYLOADS].count - 1, 24);
        const size_t offset = zcr_load_size(last), nbytes = zcr_load_size(last + 8);
        if (offset > region || nbytes > region - offset) {
            return 13;
        }
        region -= offset + nbytes;
    }
    return region > a->mask ? 13 : ZCR_OK;
}

/* Finds the vectors of the index (R19 to R23). */
ZCR_FUNCTION zcr_status zcr_read_index(zcr_archive *a)
{
    /* Bytes an item takes, and 128 more where a multiple of 4 does for its place; that of others is one of 8. */
    static const unsigned char items[ZCR_V_COUNT] = {0, 128 + 1, 8, 8, 8, 24, 48, 128 + 4, 128 + 4, 128 + 48, 32, 32};
    const unsigned char *const index = a->base + a->extent[ZCR_E_INDEX], *vtable;
    const uint32_t size = (uint32_t)a->extent[ZCR_E_INDEX_SIZE];
    uint32_t table, at, vtable_size, table_size;
    unsigned id;
    table = ZCR_LOAD32(index);
    if (ZCR_LOAD32(index + 4) != 0x3152435Au || table & 3 || table > size - 4) {
        return 19;
    }
    at = table - ZCR_LOAD32(index + (size_t)table); /* below 0 it wraps to more than any size */
    if (at & 1 || at > size - 4) {
        return 20;
    }
    vtable = index + (size_t)at;
    vtable_size = ZCR_LOAD16(vtable);
    table_size = ZCR_LOAD16(vtable + 2);
    if (vtable_size & 1 || vtable_size > size - at || table_size > size - table) { /* of less than 4, no module: R37 */
        return 20;
    }
    for (id = 0; id < ZCR_V_COUNT; id++) {
        const unsigned item = items[id];
        uint32_t count = 0;
        at = 4 + 2 * id < vtable_size ? ZCR_LOAD16(vtable + 4 + 2 * id) : 0;
        if (at) {
            if (at < 4 || at + (id ? 4 : 1) > table_size) {
                return 21;
            }
            at += table;
            count = index[(size_t)at];
            if (id) {
                if (at & 3) {
                    return 22;
                }
                count = ZCR_LOAD32(index + (size_t)at); /* the distance first */
                if (count & 3 || count > size - 4 - at) {
                    return 22;
                }
                at += count;
                count = ZCR_LOAD32(index + (size_t)at);
                at += 4;
                if ((at & 4 && item < 128) || (uint64_t)count * (item & 127) > size - at) {
                    return 22;
                }
            }
        }
        a->v[id].items = index + (size_t)at;
        a->v[id].count = count;
    }
    return zcr_check_counts(a);
}

/* Opens the archive that `size` bytes are, from first to last (R14). A size that goes round memory is refused. */
static inline zcr_status zcr_open(zcr_archive *a, const void *data, size_t size)
{
    const unsigned char *header = (const unsigned char *)data, *trailer;
    zcr_status status = zcr_read_end(a, header, size);
    unsigned same = 64;
    if (status) {
        return status;
    }
    if ((uintptr_t)data + size < size) { /* no archive goes round memory */
        return 14;
    }
    a->base = header;
    trailer = header + (size - 64);
    if (!a->base_mask) { /* unsealed: the trailer has the rest, but magic, version, alignment */
        status = zcr_read_end(a, trailer, size);
        if (status) {
            return status;
        }
        same = 10;
    }
    if (a->extent[ZCR_E_SIZE] != size) {
        return 14;
    }
    if (zcr_compare(header, same, trailer, same)) {
        return 8;
    }
    return zcr_read_index(a);
}

/* Opens the archive at the start of `size` bytes, which others may follow (R15); ZCR_ANY_SIZE where only its address
 * is known, as in flash: then it is as long as its header says, and what it says has to be there to be read. */
static inline zcr_status zcr_open_prefix(zcr_archive *a, const void *data, size_t size)
{
    zcr_status status = zcr_read_end(a, (const unsigned char *)data, size);
    size_t most;
    if (status) {
        return status;
    }
    most = a->extent[ZCR_E_SIZE];
    /* An unsealed one's 0 wraps; a size that does not fit was made an odd one. */
    if (most - 1 >= size || most & 7) {
        return 15;
    }
    return zcr_open(a, data, most);
}

/* Returns 32 bits that may lie at any address. */
ZCR_FUNCTION uint32_t zcr_load_any(const unsigned char *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Returns where the bytes of a file end that may end in an archive (R16): of a signed Windows program where its
 * certificate table starts, which is the end of the file, less up to 7 zeros before it; otherwise its size. */
ZCR_FUNCTION size_t zcr_unsigned_size(const unsigned char *file, size_t size)
{
    const unsigned char *p = file;
    size_t left = size, end;
    uint32_t at, kind, more;
    unsigned zeros;
    if (left < 64 || p[0] != 'M' || p[1] != 'Z') {
        return size;
    }
    at = zcr_load_any(p + 60);
    if (at > left) {
        return size;
    }
    p += (size_t)at;
    left -= (size_t)at;
    if (left < 160 || zcr_load_any(p) != 0x4550) { /* "PE", 0, 0 */
        return size;
    }
    kind = zcr_load_any(p + 24) & 0xFFFF;
    more = kind == 0x20B ? 16 : 0; /* what the headers of 64 bits have more than those of 32 */
    if ((kind != 0x10B && kind != 0x20B) || left < 160 + more || zcr_load_any(p + 116 + more) < 5) {
        return size;
    }
    at = zcr_load_any(p + 152 + more);
    kind = zcr_load_any(p + 156 + more); /* the table's bytes */
    if (!kind || at > size || size - at != kind) {
        return size;
    }
    end = (size_t)at;
    for (zeros = 0; zeros < 8 && end >= 64; zeros++, end--) {
        if (zcr_load_any(file + (end - 64)) == 0x52435A89u && zcr_load_any(file + (end - 60)) == 0x0A1A0A0Du) {
            return end;
        }
        if (file[end - 1]) {
            break;
        }
    }
    return (size_t)at;
}

/* Opens the archive at the end of `size` bytes (R16), as one that was appended to an executable; before the signature
 * of a Windows program that was signed after. The size is needed: of ZCR_ANY_SIZE, or any other that goes round memory,
 * nothing is read, and the status is 16. */
ZCR_FUNCTION zcr_status zcr_open_suffix(zcr_archive *a, const void *data, size_t size)
{
    const unsigned char *end;
    zcr_status status;
    if (size < 128) {
        return 1;
    }
    if ((uintptr_t)data + size < size) {
        return 16;
    }
    size = zcr_unsigned_size((const unsigned char *)data, size);
    if (size < 128) {
        return 16;
    }
    end = (const unsigned char *)data + size;
    status = zcr_read_end(a, end - 64, size);
    if (status) {
        return status;
    }
    if (a->extent[ZCR_E_SIZE] - 1 >= size) {
        return 16;
    }
    return zcr_open(a, end - a->extent[ZCR_E_SIZE], a->extent[ZCR_E_SIZE]);
}

/* Returns the archive's bytes, from its first to its last: after zcr_open_prefix where the next may begin. */
static inline size_t zcr_size(const zcr_archive *a)
{
    return a->extent[ZCR_E_SIZE];
}

/* Returns what the archive's address should be a multiple of, for its elements to lie as they were meant to. */
static inline uint32_t zcr_alignment(const zcr_archive *a)
{
    return a->base_mask + 1;
}

/* ---- Tensors --------------------------------------------------------------------------------------------------- */

/* Finds payload i, below the count, after checking it beside the one before (R56 to R60). */
static inline zcr_status zcr_load_payload(const zcr_archive *a, uint32_t i, const unsigned char **data, size_t *nbytes)
{
    const unsigned char *p = zcr_row(a, ZCR_V_PAYLOADS, i, 24);
    const size_t offset = zcr_load_size(p), size = zcr_load_size(p + 8);
    const size_t room = zcr_payload_room(a);
    const uint64_t digest = ZCR_LOAD64(p + 16);
    size_t before = 0, hole = offset;
    if (!size || offset > room || size > room - offset) {
        return 56;
    }
    if (offset & a->mask) {
        return 57;
    }
    if (i) {
        before = zcr_load_size(p - 24);
        hole = zcr_load_size(p - 16);
        if (before == offset && hole == size) {
            if (digest != ZCR_LOAD64(p - 8)) {
                return 60;
            }
            hole = 0;
        } else {
            if (before > offset || hole > offset - before) {
                return 58;
            }
            hole = offset - before - hole;
        }
    }
    if (hole > a->base_mask) {
        return 59;
    }
    if (digest && !a->v[ZCR_V_DIGEST_KIND].count) {
        return 60;
    }
    *data = a->base + a->extent[ZCR_E_PAYLOADS] + offset;
    *nbytes = size;
    return ZCR_OK;
}

/* Finds payload i, whatever is in it; with zcr_payload_number, all the bytes that a tensor shares with others. */
static inline zcr_status zcr_payload(const zcr_archive *a, uint32_t i, const unsigned char **data, size_t *nbytes)
{
    return i < a->v[ZCR_V_PAYLOADS].count ? zcr_load_payload(a, i, data, nbytes) : ZCR_NOT_FOUND;
}

/* Returns how many bits elements of a type take: 0 for strings, 255 for a type that this reader does not know. */
ZCR_FUNCTION unsigned zcr_natural_width(unsigned dtype)
{
    static const unsigned char runs[] = {/* the last type of a run of neighbours, the width of each of them */
        /* generated by tools/generate from dtypes.py: widths */
        0, 255, ZCR_INT8, 8, ZCR_INT16, 16, ZCR_INT32, 32, ZCR_INT64, 64, 15, 255, ZCR_BFLOAT16, 16, ZCR_FLOAT32, 32,
        ZCR_COMPLEX64, 64, ZCR_COMPLEX128, 128, 31, 255, ZCR_FLOAT8_E8M0FNU, 8, 47, 255, ZCR_FLOAT6_E3M2FN, 6,
        ZCR_INT4, 4, ZCR_INT2, 2, 63, 255, ZCR_STRING, 0, 255, 255
        /* end */
    };
    const unsigned char *run = runs;
    while (dtype > *run) {
        run += 2;
    }
    return run[1];
}

/* Returns whether elements of a type may be so many bits wide (R46). */
static inline int zcr_is_width(unsigned dtype, unsigned bits)
{
    const unsigned natural = zcr_natural_width(dtype);
    if (natural == 255) {
        return dtype && bits - 1 < 128;
    }
    return bits == natural || (bits == 8 && natural - 1 < 8); /* 0 wraps */
}

/* Checks strides, and that all they reach lies in the payload of `nbytes` (R53, R54); finds element [0, ..., 0]. */
static inline zcr_status zcr_check_strides(zcr_tensor *t, size_t nbytes)
{
    const unsigned char *dim = t->dims, *at = t->strides;
    const size_t offset = zcr_load_size(t->entry + 24);
    const unsigned item = t->bits / 8u;
    size_t room[2]; /* in elements: from the first one on, and before it */
    unsigned rank;
    if (offset > nbytes) {
        return 53;
    }
    room[0] = (nbytes - offset) / item;
    room[1] = offset / item;
    if (room[1] * item != offset) {
        return 54;
    }
    for (rank = t->rank; rank; rank--) {
        uint64_t stride = ZCR_LOAD64(at), reach;
        size_t *const left = &room[(size_t)(stride >> 63)];
        if (stride >> 63) {
            stride = 0 - stride;
        }
        reach = zcr_multiply(stride, ZCR_LOAD64(dim) - 1);
        if (stride > (uint64_t)1 << 56 || reach > *left) {
            return 53;
        }
        *left -= (size_t)reach;
        at += 8;
        dim += 8;
    }
    t->first += offset;
    return room[0] ? ZCR_OK : 53;
}

/* Checks that the elements of a tensor lie in its payload: shape, strides, offset (R49 to R55, and of R71 the size). */
ZCR_FUNCTION zcr_status zcr_check_shape(zcr_tensor *t)
{
    const unsigned char *at = t->dims;
    const size_t nbytes = t->nbytes;
    uint64_t bits = t->bits ? t->bits : 64; /* a string takes one end */
    unsigned rank, empty = 0;
    for (rank = t->rank; rank; rank--) {
        const uint64_t dim = ZCR_LOAD64(at);
        at += 8;
        if (dim) {
            bits = zcr_multiply(bits, dim);
        } else {
            empty = 1;
        }
    }
    if (bits > (uint64_t)1 << 59) {
        return 49;
    }
    if (empty != !t->first) {
        return 50;
    }
    bits = (bits + 7) >> 3;
    if (t->strides) { /* without elements there are no bytes, and so no strides */
        t->nbytes = (size_t)bits;
        return bits > nbytes ? 55 : zcr_check_strides(t, nbytes);
    }
    if (ZCR_LOAD64(t->entry + 24)) {
        return 51;
    }
    if (empty) {
        return ZCR_OK;
    }
    if (!t->bits) {
        return nbytes & 7 || nbytes - 8 < bits ? 71 : ZCR_OK;
    }
    return bits != nbytes ? 51 : ZCR_OK;
}

/* Finds tensor i of the saved order and checks its entry (R26, R27, R33, R45 to R60, and of R71 the size): after this
 * all its elements lie in the archive. */
static inline zcr_status zcr_load_tensor(const zcr_archive *a, uint32_t i, zcr_tensor *t)
{
    const unsigned char *const e = zcr_row(a, ZCR_V_TENSORS, i, 48);
    uint32_t payload;
    zcr_status status;
    t->archive = a;
    t->entry = e;
    t->name_size = ZCR_LOAD32(e + 4);
    t->dtype = e[40];
    t->bits = e[41];
    t->rank = e[42];
    t->first = NULL;
    t->strides = NULL;
    t->nbytes = 0;
    t->name = (const char *)zcr_span(a, e);
    if (!t->name) {
        return 27;
    }
    if (e[43] | ZCR_LOAD32(e + 44)) {
        return 26;
    }
    if (ZCR_LOAD32(e + 8) - 1 >= t->name_size) { /* 0 wraps */
        return 33;
    }
    if (ZCR_LOAD32(e + 12) >= a->v[ZCR_V_MODULES].count) {
        return 45;
    }
    if (!zcr_is_width(t->dtype, t->bits)) {
        return 46;
    }
    if (t->rank > ZCR_MAX_RANK) {
        return 47;
    }
    t->dims = zcr_range(a, ZCR_V_DIMS, ZCR_LOAD32(e + 32), t->rank);
    if (!t->dims) {
        return 48;
    }
    if (ZCR_LOAD32(e + 36) != ZCR_NONE) {
        t->strides = zcr_range(a, ZCR_V_STRIDES, ZCR_LOAD32(e + 36), t->rank);
        if (!t->strides || !t->bits || t->bits & 7) {
            return 52;
        }
    }
    payload = ZCR_LOAD32(e + 20);
    if (payload != ZCR_NONE) {
        status = payload < a->v[ZCR_V_PAYLOADS].count ? zcr_load_payload(a, payload, &t->first, &t->nbytes) : 50;
        if (status) {
            return status;
        }
    }
    return zcr_check_shape(t);
}

/* Finds the tensor of a full name, `name_size` bytes of UTF-8 without NUL, in about log2(n) comparisons, as FORMAT.md
 * says of level `touch`: an entry on the way that is wrong is an error (27, 32), and not passed over. */
static inline zcr_status zcr_find(const zcr_archive *a, const char *name, size_t name_size, zcr_tensor *t)
{
    const uint32_t count = a->v[ZCR_V_TENSORS].count;
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2, i = ZCR_LOAD32(zcr_row(a, ZCR_V_BY_NAME, middle, 4));
        const unsigned char *e, *found;
        int order;
        if (i >= count) {
            return 32;
        }
        e = zcr_row(a, ZCR_V_TENSORS, i, 48);
        found = zcr_span(a, e);
        if (!found) {
            return 27;
        }
        order = zcr_compare(found, (size_t)ZCR_LOAD32(e + 4), (const unsigned char *)name, name_size);
        if (!order) {
            return zcr_load_tensor(a, i, t);
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return ZCR_NOT_FOUND;
}

/* zcr_find for a name that ends with NUL. */
static inline zcr_status zcr_get(const zcr_archive *a, const char *name, zcr_tensor *t)
{
    size_t size = 0;
    while (name[size]) {
        size++;
    }
    return zcr_find(a, name, size, t);
}

static inline uint32_t zcr_tensor_count(const zcr_archive *a)
{
    return a->v[ZCR_V_TENSORS].count;
}

/* Finds tensor i in the order in which they were saved. Of an archive that is not verified the name may be no UTF-8. */
static inline zcr_status zcr_tensor_at(const zcr_archive *a, uint32_t i, zcr_tensor *t)
{
    return i < a->v[ZCR_V_TENSORS].count ? zcr_load_tensor(a, i, t) : ZCR_NOT_FOUND;
}

/* Finds tensor i in ascending order of names. */
static inline zcr_status zcr_tensor_sorted(const zcr_archive *a, uint32_t i, zcr_tensor *t)
{
    uint32_t number;
    if (i >= a->v[ZCR_V_BY_NAME].count) {
        return ZCR_NOT_FOUND;
    }
    number = ZCR_LOAD32(zcr_row(a, ZCR_V_BY_NAME, i, 4));
    return number < a->v[ZCR_V_TENSORS].count ? zcr_load_tensor(a, number, t) : 32;
}

/* Returns a tensor's number in the order in which they were saved. */
static inline uint32_t zcr_number(const zcr_tensor *t)
{
    return (uint32_t)(((uintptr_t)t->entry - (uintptr_t)t->archive->v[ZCR_V_TENSORS].items) / 48);
}

/* Returns the number of its module. */
static inline uint32_t zcr_parent(const zcr_tensor *t)
{
    return ZCR_LOAD32(t->entry + 12);
}

/* Returns its place among its module's children of every kind. */
static inline uint32_t zcr_place(const zcr_tensor *t)
{
    return ZCR_LOAD32(t->entry + 16);
}

/* Returns the number of its payload: tensors that have one in common are tied, or views of one base. ZCR_NONE: none. */
static inline uint32_t zcr_payload_number(const zcr_tensor *t)
{
    return ZCR_LOAD32(t->entry + 20);
}

/* Returns how many bytes that payload has, which are more than t->nbytes where elements leave some out; 0: none. */
static inline size_t zcr_payload_bytes(const zcr_tensor *t)
{
    return t->first ? zcr_load_size(zcr_row(t->archive, ZCR_V_PAYLOADS, zcr_payload_number(t), 24) + 8) : 0;
}

/* Returns how many of the last bytes of the name are its key in its module. */
static inline uint32_t zcr_key_size(const zcr_tensor *t)
{
    return ZCR_LOAD32(t->entry + 8);
}

/* Returns that key, followed by NUL. */
static inline const char *zcr_key(const zcr_tensor *t)
{
    return t->name + (size_t)(t->name_size - zcr_key_size(t));
}

/* Returns the size of one axis; 0 for one that is not below the rank. */
static inline uint64_t zcr_dim(const zcr_tensor *t, unsigned axis)
{
    return axis < t->rank ? ZCR_LOAD64(t->dims + 8 * axis) : 0;
}

/* Returns whether a tensor has this shape: so many axes, of these sizes. To be asked before elements are read by a
 * program that knows how many there should be. */
ZCR_FUNCTION int zcr_has_shape(const zcr_tensor *t, unsigned rank, const uint64_t *dims)
{
    unsigned axis;
    if (t->rank != rank) {
        return 0;
    }
    for (axis = 0; axis < rank; axis++) {
        if (zcr_dim(t, axis) != dims[axis]) {
            return 0;
        }
    }
    return 1;
}

/* Returns the number of elements. */
ZCR_FUNCTION uint64_t zcr_count(const zcr_tensor *t)
{
    uint64_t count = 1;
    unsigned axis;
    for (axis = 0; axis < t->rank; axis++) {
        count *= zcr_dim(t, axis);
    }
    return count;
}

/* Returns the stride of one axis in elements, that of C order where none are stored; 0 for an axis that is not below
 * the rank. */
ZCR_FUNCTION int64_t zcr_stride(const zcr_tensor *t, unsigned axis)
{
    uint64_t stride = 1;
    unsigned later;
    if (axis >= t->rank) {
        return 0;
    }
    if (t->strides) {
        stride = ZCR_LOAD64(t->strides + 8 * axis);
        return stride >> 63 ? -(int64_t)(0 - stride) : (int64_t)stride;
    }
    for (later = axis + 1; later < t->rank; later++) {
        const uint64_t dim = zcr_dim(t, later);
        stride *= dim ? dim : 1;
    }
    return (int64_t)stride;
}

/* Returns whether elements lie in C order without gaps. */
ZCR_FUNCTION int zcr_is_contiguous(const zcr_tensor *t)
{
    uint64_t stride = 1;
    unsigned axis = t->rank;
    if (!t->strides) {
        return 1;
    }
    while (axis--) {
        const uint64_t dim = zcr_dim(t, axis);
        if (dim != 1 && ZCR_LOAD64(t->strides + 8 * axis) != stride) {
            return 0;
        }
        stride *= dim;
    }
    return 1;
}

/* Returns the elements, t->nbytes in C order; NULL if they do not lie so, or if there are none. Elements of
 * less than a byte are packed unless `bits` is 8: see zcr_packed. For strings see zcr_string. */
static inline const void *zcr_data(const zcr_tensor *t)
{
    return t->first && zcr_is_contiguous(t) ? t->first : NULL;
}

/* Returns element [0, ..., 0] of any tensor, NULL if there are none; the others lie as zcr_stride says. */
static inline const void *zcr_strided_data(const zcr_tensor *t)
{
    return t->first;
}

/* Returns zcr_data if the elements are of that type, of that many bytes in C, and aligned; NULL otherwise. */
ZCR_FUNCTION const void *zcr_typed(const zcr_tensor *t, unsigned dtype, unsigned size, unsigned parts)
{
    const void *data = zcr_data(t);
    return t->dtype == dtype && t->bits == 8 * size * parts && !((uintptr_t)data & (size - 1)) ? data : NULL;
}

/* The elements as C's own types, zcr_count of them; NULL if they are of another type, not in C order, not aligned, or
 * if there are none: an empty tensor is found, and has no address. Floats of 16 bits are their bits; a complex element
 * is two floats or doubles, its real part first. */
/* generated by tools/generate from dtypes.py: accessors */
static inline const uint8_t *zcr_bool(const zcr_tensor *t)
{
    return (const uint8_t *)zcr_typed(t, ZCR_BOOL, 1, 1);
}
static inline const uint8_t *zcr_u8(const zcr_tensor *t)
{
    return (const uint8_t *)zcr_typed(t, ZCR_UINT8, 1, 1);
}
static inline const int8_t *zcr_i8(const zcr_tensor *t)
{
    return (const int8_t *)zcr_typed(t, ZCR_INT8, 1, 1);
}
static inline const uint16_t *zcr_u16(const zcr_tensor *t)
{
    return (const uint16_t *)zcr_typed(t, ZCR_UINT16, 2, 1);
}
static inline const int16_t *zcr_i16(const zcr_tensor *t)
{
    return (const int16_t *)zcr_typed(t, ZCR_INT16, 2, 1);
}
static inline const uint32_t *zcr_u32(const zcr_tensor *t)
{
    return (const uint32_t *)zcr_typed(t, ZCR_UINT32, 4, 1);
}
static inline const int32_t *zcr_i32(const zcr_tensor *t)
{
    return (const int32_t *)zcr_typed(t, ZCR_INT32, 4, 1);
}
static inline const uint64_t *zcr_u64(const zcr_tensor *t)
{
    return (const uint64_t *)zcr_typed(t, ZCR_UINT64, 8, 1);
}
static inline const int64_t *zcr_i64(const zcr_tensor *t)
{
    return (const int64_t *)zcr_typed(t, ZCR_INT64, 8, 1);
}
static inline const uint16_t *zcr_f16(const zcr_tensor *t)
{
    return (const uint16_t *)zcr_typed(t, ZCR_FLOAT16, 2, 1);
}
static inline const uint16_t *zcr_bf16(const zcr_tensor *t)
{
    return (const uint16_t *)zcr_typed(t, ZCR_BFLOAT16, 2, 1);
}
static inline const float *zcr_f32(const zcr_tensor *t)
{
    return (const float *)zcr_typed(t, ZCR_FLOAT32, (unsigned)sizeof(float), 1);
}
static inline const double *zcr_f64(const zcr_tensor *t)
{
    return (const double *)zcr_typed(t, ZCR_FLOAT64, (unsigned)sizeof(double), 1);
}
static inline const float *zcr_c64(const zcr_tensor *t)
{
    return (const float *)zcr_typed(t, ZCR_COMPLEX64, (unsigned)sizeof(float), 2);
}
static inline const double *zcr_c128(const zcr_tensor *t)
{
    return (const double *)zcr_typed(t, ZCR_COMPLEX128, (unsigned)sizeof(double), 2);
}
/* end */

/* Returns the bits of element i of packed data, whose elements take 1 to 8 bits; i is below the count. */
static inline unsigned zcr_packed(const void *data, unsigned bits, size_t i)
{
    /* Eight elements take `bits` bytes: so no product of bits wraps where bytes do not. */
    const unsigned char *const p = (const unsigned char *)data + i / 8 * bits + (size_t)(i % 8 * bits / 8);
    const unsigned shift = (unsigned)(i % 8 * bits % 8);
    const unsigned low = (unsigned)*p >> shift;
    return (shift + bits > 8 ? low | (unsigned)p[1] << (8 - shift) : low) & ((1u << bits) - 1);
}

/* Returns the same bits as the number that int4, int2 or another signed type stands for. */
static inline int zcr_packed_signed(const void *data, unsigned bits, size_t i)
{
    const unsigned sign = 1u << (bits - 1);
    return (int)(zcr_packed(data, bits, i) ^ sign) - (int)sign;
}

/* Finds string i, in C order; its bytes are followed by no NUL. Checks the two ends it uses (R71). */
ZCR_FUNCTION zcr_status zcr_string(const zcr_tensor *t, size_t i, const char **data, size_t *size)
{
    const uint64_t count = zcr_count(t);
    size_t room, start, end;
    const unsigned char *ends;
    if (t->dtype != ZCR_STRING) {
        return ZCR_UNSUPPORTED;
    }
    if (i >= count) {
        return ZCR_NOT_FOUND;
    }
    room = t->nbytes - ((size_t)count + 1) * 8;
    ends = t->first + room;
    start = zcr_load_size(ends + 8 * i);
    end = zcr_load_size(ends + 8 * i + 8);
    if (start > end || end > room || (!i && start)) {
        return 71;
    }
    *data = (const char *)(t->first + start);
    *size = end - start;
    return ZCR_OK;
}

/* ---- Verifying the index --------------------------------------------------------------------------------------- */

/* Returns how many bytes of memory zcr_verify needs for itself: 8 for each tensor, module and attribute, or 1 for each
 * payload if that is more. */
static inline size_t zcr_verify_scratch(const zcr_archive *a)
{
    const size_t children = (size_t)a->v[ZCR_V_TENSORS].count + (size_t)a->v[ZCR_V_MODULES].count +
                            (size_t)a->v[ZCR_V_ATTRIBUTES].count;
    const size_t payloads = (size_t)a->v[ZCR_V_PAYLOADS].count;
    return payloads < children * 8 ? children * 8 : payloads;
}

/* Returns whether all of the text pool is UTF-8 (R28). */
static inline int zcr_is_utf8(const unsigned char *p, uint32_t size)
{
    while (size--) {
        uint32_t point = *p++;
        unsigned more = (point >= 0xE0 ? 1u : 0u) + (point >= 0xF0 ? 1u : 0u), shift = 5 * more + 6;
        if (point < 0x80) {
            continue;
        }
        if (point < 0xC0 || point > 0xF4 || more >= size) {
            return 0;
        }
        point &= 0x1Fu >> more;
        size -= ++more;
        for (; more; more--) {
            if ((*p & 0xC0) != 0x80) {
                return 0;
            }
            point = point << 6 | (*p++ & 0x3Fu);
        }
        if (!(point >> (shift < 7 ? 7 : shift)) || point - 0xD800 < 0x800 || point > 0x10FFFF) {
            return 0;
        }
    }
    return 1;
}

/* Checks a name and takes its size from what the index may take of its pools (R27 to R30). */
ZCR_FUNCTION zcr_status zcr_check_name(const zcr_archive *a, const unsigned char *span, uint64_t *budget, int empty)
{
    const unsigned char *text = zcr_span(a, span);
    uint32_t size = ZCR_LOAD32(span + 4);
    if (!text) {
        return 27;
    }
    if ((*text & 0xC0) == 0x80) {
        return 28;
    }
    if (!size && !empty) {
        return 29;
    }
    if (size > *budget) {
        return 30;
    }
    *budget -= size;
    while (size--) {
        if (!*text++) {
            return 29;
        }
    }
    return ZCR_OK;
}

/* Checks that a full name is its module's, a dot and the key (R34); both names were checked. */
ZCR_FUNCTION zcr_status zcr_check_full_name(const zcr_archive *a, const unsigned char *span, uint32_t key_size,
                                            uint32_t parent)
{
    const unsigned char *const text = a->v[ZCR_V_TEXT].items, *module, *name;
    uint32_t size = ZCR_LOAD32(span + 4);
    if (!parent) {
        return key_size == size ? ZCR_OK : 34;
    }
    if (key_size - 1 >= size - 1) { /* 0 wraps */
        return 34;
    }
    module = zcr_row(a, ZCR_V_MODULES, parent, 48);
    name = text + (size_t)ZCR_LOAD32(span);
    size -= key_size + 1;
    if (size != ZCR_LOAD32(module + 4) || name[(size_t)size] != '.' ||
        zcr_compare(name, (size_t)size, text + (size_t)ZCR_LOAD32(module), (size_t)size)) {
        return 34;
    }
    return ZCR_OK;
}

/* Checks modules: names, kinds, pre-order, depth (R26 to R30, R34, R37 to R41). */
static inline zcr_status zcr_check_modules(const zcr_archive *a, uint64_t *budget)
{
    const uint32_t count = a->v[ZCR_V_MODULES].count;
    uint32_t i, parent, end, depth;
    zcr_status status;
    for (i = 0; i < count; i++) {
        const unsigned char *const m = zcr_row(a, ZCR_V_MODULES, i, 48);
        if (m[41] | ZCR_LOAD16(m + 42) | ZCR_LOAD32(m + 44)) {
            return 26;
        }
        status = zcr_check_name(a, m, budget, !i);
        if (!status) {
            status = zcr_check_name(a, m + 8, budget, 1);
        }
        if (status) {
            return status;
        }
        if (!m[40]) {
            return 41;
        }
        parent = ZCR_LOAD32(m + 20);
        end = ZCR_LOAD32(m + 24);
        if (!i) {
            if (parent != ZCR_NONE || end != count || ZCR_LOAD32(m + 4) | ZCR_LOAD32(m + 16) | ZCR_LOAD32(m + 28)) {
                return 37;
            }
        } else {
            const unsigned char *up;
            uint32_t last;
            if (parent >= i) {
                return 38;
            }
            up = zcr_row(a, ZCR_V_MODULES, parent, 48);
            last = ZCR_LOAD32(up + 24);
            if (end <= i || end > last) {
                return 38;
            }
            if (end < last && ZCR_LOAD32(zcr_row(a, ZCR_V_MODULES, end, 48) + 20) != parent) {
                return 39;
            }
            status = zcr_check_full_name(a, m, ZCR_LOAD32(m + 16), parent);
            if (status) {
                return status;
            }
            for (depth = 1; parent; depth++) { /* no walk is longer than 100: this is linear */
                if (depth == 99) {
                    return 40;
                }
                parent = ZCR_LOAD32(zcr_row(a, ZCR_V_MODULES, parent, 48) + 20);
            }
        }
        if (i + 1 < end && ZCR_LOAD32(m + 48 + 20) != i) {
            return 39;
        }
    }
    return ZCR_OK;
}

/* A child of a module: tensors, modules and attributes have one numbering, in this order. */
typedef struct zcr_child_row {
    uint32_t parent, place, key_size;
    const unsigned char *key;
} zcr_child_row;

/* By what children are sorted. */
enum { ZCR_BY_PLACE, ZCR_BY_KEY, ZCR_BY_FULL_NAME };

ZCR_FUNCTION void zcr_read_child(const zcr_archive *a, unsigned by, uint32_t child, zcr_child_row *row)
{
    static const unsigned char kinds[3][5] = {/* vector, bytes of an item, where parent, place and key_size lie */
        {ZCR_V_TENSORS, 48, 12, 16, 8}, {ZCR_V_MODULES, 48, 20, 28, 16}, {ZCR_V_ATTRIBUTES, 32, 16, 20, 4}};
    const unsigned char *kind = kinds[0], *e;
    uint32_t size;
    while (child >= a->v[kind[0]].count) {
        child -= a->v[kind[0]].count;
        kind += 5;
    }
    e = zcr_row(a, kind[0], child, kind[1]);
    size = ZCR_LOAD32(e + 4);
    row->parent = ZCR_LOAD32(e + kind[2]);
    row->place = ZCR_LOAD32(e + kind[3]);
    row->key_size = ZCR_LOAD32(e + kind[4]);
    if (by == ZCR_BY_FULL_NAME) {
        row->parent = 0;
        row->key_size = size;
    }
    row->key = a->v[ZCR_V_TEXT].items + (size_t)(ZCR_LOAD32(e) + size - row->key_size);
}

/* Returns how two children are ordered, by their modules first; 0 if they must not both be there. */
ZCR_FUNCTION int zcr_order_children(const zcr_archive *a, unsigned by, uint32_t child, uint32_t other)
{
    zcr_child_row x, y;
    zcr_read_child(a, by, child, &x);
    zcr_read_child(a, by, other, &y);
    if (x.parent == y.parent && by) {
        return zcr_compare(x.key, (size_t)x.key_size, y.key, (size_t)y.key_size);
    }
    if (x.parent == y.parent) {
        x.parent = x.place;
        y.parent = y.place;
    }
    return x.parent < y.parent ? -1 : x.parent > y.parent;
}

/* Checks that tensors (by by_module) or attributes lie module by module, where modules say that theirs begin, and
 * ascend there: tensors by number, attributes by place (R42, R43, R64). */
ZCR_FUNCTION zcr_status zcr_check_groups(const zcr_archive *a, unsigned vector)
{
    const unsigned tensors = vector == ZCR_V_TENSORS, first = tensors ? 32 : 36;
    const uint32_t count = a->v[vector].count, modules = a->v[ZCR_V_MODULES].count;
    uint32_t k = 0, module, end, least;
    for (module = 0; module < modules; module++) {
        const unsigned char *const m = zcr_row(a, ZCR_V_MODULES, module, 48);
        end = module + 1 < modules ? ZCR_LOAD32(m + 48 + first) : count;
        if (ZCR_LOAD32(m + first) != k || end > count) {
            return 43;
        }
        for (least = 0; k < end; k++) {
            const unsigned char *e;
            uint32_t number = k;
            if (tensors && a->v[ZCR_V_BY_MODULE].count) {
                number = ZCR_LOAD32(zcr_row(a, ZCR_V_BY_MODULE, k, 4));
                if (number >= count) {
                    return 42;
                }
            }
            e = zcr_row(a, vector, number, tensors ? 48 : 32);
            if (!tensors) {
                number = ZCR_LOAD32(e + 20);
            }
            if (ZCR_LOAD32(e + (tensors ? 12 : 16)) != module || number < least) {
                return tensors ? 42 : 64;
            }
            least = number + 1; /* a place that wraps is refused with all that are too great (R44) */
        }
    }
    return ZCR_OK;
}

/* Checks attributes and metadata, one by one, and marks the payloads they use (R26 to R31, R65 to R68). */
static inline zcr_status zcr_check_values(const zcr_archive *a, unsigned char *used, uint64_t *budget)
{
    unsigned vector;
    for (vector = ZCR_V_ATTRIBUTES; vector <= ZCR_V_METADATA; vector++) {
        const unsigned char *e = a->v[vector].items;
        uint32_t rows, left;
        for (rows = a->v[vector].count; rows; rows--, e += 32) {
            const unsigned char *word = e + 8;
            const unsigned type = e[24];
            zcr_status status = zcr_check_name(a, e, budget, 0);
            if (status) {
                return status;
            }
            if (ZCR_LOAD16(e + 26) | ZCR_LOAD32(e + 28)) {
                return 26;
            }
            if (vector == ZCR_V_METADATA) {
                if (ZCR_LOAD32(e + 16) != ZCR_NONE || ZCR_LOAD32(e + 20)) {
                    return 65;
                }
                if (e != a->v[vector].items &&
                    zcr_compare(zcr_span(a, e - 32), (size_t)ZCR_LOAD32(e - 28), zcr_span(a, e),
                                (size_t)ZCR_LOAD32(e + 4)) >= 0) {
                    return 65;
                }
            }
            if (type > ZCR_VALUE_BYTES || e[25] > ZCR_FORM_TUPLE) {
                return 66;
            }
            left = 1;
            if (e[25]) {
                left = ZCR_LOAD32(word + 4);
                word = zcr_range(a, ZCR_V_WORDS, ZCR_LOAD32(word), left);
                if (!word) {
                    return 67;
                }
                if (left > *budget / 16) {
                    return 30;
                }
                *budget -= (uint64_t)16 * left;
            }
            for (; left; left--, word += 8) {
                const uint32_t low = ZCR_LOAD32(word), high = ZCR_LOAD32(word + 4);
                if (type == ZCR_VALUE_TEXT) {
                    const unsigned char *const text = zcr_span(a, word);
                    if (!text || (*text & 0xC0) == 0x80) {
                        return 68;
                    }
                    if (high > *budget) {
                        return 30;
                    }
                    *budget -= high;
                } else if (type <= ZCR_VALUE_BOOL) {
                    if (high || low > type) { /* the greatest nil is 0, the greatest bool 1 */
                        return 68;
                    }
                } else if (type == ZCR_VALUE_BYTES && (high || low != ZCR_NONE)) {
                    if (high || low >= a->v[ZCR_V_PAYLOADS].count) {
                        return 68;
                    }
                    used[(size_t)low] = 1;
                }
            }
        }
    }
    return ZCR_OK;
}

/* Checks that places are 0, 1, 2, ... in each module, that keys are unique in it, or full names of modules at all (R44,
 * R36, R35). Sorts by merging: each comparison costs no more than the name that it puts in its place, and so all of
 * them no more than all names log2(n) times, however they are chosen. */
ZCR_FUNCTION zcr_status zcr_check_children(const zcr_archive *a, unsigned by, uint32_t *from)
{
    const uint32_t tensors = a->v[ZCR_V_TENSORS].count, modules = a->v[ZCR_V_MODULES].count;
    uint32_t first = by == ZCR_BY_FULL_NAME ? tensors + 1 : 0, count = 0, width, start, k, expected = 0;
    const uint32_t last = tensors + modules + (by == ZCR_BY_FULL_NAME ? 0 : a->v[ZCR_V_ATTRIBUTES].count);
    uint32_t *to;
    zcr_child_row row;
    for (; first < last; first++) {
        if (first != tensors) { /* module 0 is no child */
            from[(size_t)count++] = first;
        }
    }
    to = from + (size_t)count;
    for (width = 1; width < count; width *= 2) {
        uint32_t *const merged = to;
        for (start = 0; start < count; start += width * 2) {
            uint32_t i = start, j = start + width;
            const uint32_t middle = j < count ? j : count, end = width < count - middle ? middle + width : count;
            j = middle;
            for (k = start; k < end; k++) {
                const int first_half =
                    i < middle && (j >= end || zcr_order_children(a, by, from[(size_t)i], from[(size_t)j]) <= 0);
                to[(size_t)k] = first_half ? from[(size_t)i++] : from[(size_t)j++];
            }
        }
        to = from;
        from = merged;
    }
    first = ZCR_NONE;
    for (k = 0; k < count; k++) {
        if (by != ZCR_BY_PLACE) {
            if (k && !zcr_order_children(a, by, from[(size_t)k - 1], from[(size_t)k])) {
                return by == ZCR_BY_KEY ? 36 : 35;
            }
            continue;
        }
        zcr_read_child(a, by, from[(size_t)k], &row);
        expected = row.parent == first ? expected + 1 : 0;
        if (row.place != expected) {
            return 44;
        }
        first = row.parent;
    }
    return ZCR_OK;
}

/* Checks every rule of the index, and its CRC. `scratch` is memory of zcr_verify_scratch bytes, on a multiple of 4,
 * that it may write to; nothing is kept there. Time grows as n log(n) with the index, whatever it holds. */
ZCR_FUNCTION zcr_status zcr_verify(const zcr_archive *a, void *scratch, size_t scratch_size)
{
    unsigned char *const used = (unsigned char *)scratch;
    const uint32_t payloads = a->v[ZCR_V_PAYLOADS].count, tensors = a->v[ZCR_V_TENSORS].count;
    uint64_t budget = (uint64_t)16 * a->extent[ZCR_E_INDEX_SIZE];
    zcr_status status;
    zcr_tensor t;
    uint32_t i, number, before = 0;
    unsigned by;
    if (scratch_size < zcr_verify_scratch(a) || (uintptr_t)scratch & 3) {
        return ZCR_SCRATCH;
    }
    if (zcr_crc32(a->base + a->extent[ZCR_E_INDEX], a->extent[ZCR_E_INDEX_SIZE]) !=
        ZCR_LOAD32(a->base + a->extent[ZCR_E_SIZE] - 8)) {
        return 17;
    }
    if (!zcr_is_utf8(a->v[ZCR_V_TEXT].items, a->v[ZCR_V_TEXT].count)) {
        return 28;
    }
    for (i = 0; i < payloads; i++) {
        used[(size_t)i] = 0;
        status = zcr_load_payload(a, i, &t.first, &t.nbytes);
        if (status) {
            return status;
        }
    }
    status = zcr_check_modules(a, &budget);
    if (status) {
        return status;
    }
    for (i = 0; i < tensors; i++) {
        number = ZCR_LOAD32(zcr_row(a, ZCR_V_BY_NAME, i, 4));
        if (number >= tensors) {
            return 32;
        }
        status = zcr_load_tensor(a, number, &t);
        if (!status) {
            status = zcr_check_name(a, t.entry, &budget, 0);
        }
        if (!status) {
            status = zcr_check_full_name(a, t.entry, zcr_key_size(&t), zcr_parent(&t));
        }
        if (status) {
            return status;
        }
        if (i && zcr_order_children(a, ZCR_BY_FULL_NAME, before, number) >= 0) {
            return 32;
        }
        before = number;
        number = zcr_payload_number(&t);
        if (number != ZCR_NONE) {
            used[(size_t)number] = 1;
        }
    }
    status = zcr_check_groups(a, ZCR_V_TENSORS);
    if (!status) {
        status = zcr_check_groups(a, ZCR_V_ATTRIBUTES);
    }
    if (!status) {
        status = zcr_check_values(a, used, &budget);
    }
    if (status) {
        return status;
    }
    for (i = 0; i < payloads; i++) {
        if (!used[(size_t)i]) {
            return 61;
        }
    }
    for (by = ZCR_BY_PLACE; !status && by <= ZCR_BY_FULL_NAME; by++) {
        status = zcr_check_children(a, by, (uint32_t *)scratch);
    }
    return status;
}

/* ---- Modules, attributes, metadata ----------------------------------------------------------------------------- */

/* One module. The key is the end of the name. Of an archive that is not verified the counts may be near 2^32: a loop
 * over them has to end at the first status that is not ZCR_OK. */
typedef struct zcr_module {
    const zcr_archive *archive;
    const char *name;      /* UTF-8, followed by NUL; empty for module 0, the record itself */
    const char *type_name; /* likewise; empty if there is none */
    uint32_t name_size;
    uint32_t type_name_size;
    uint32_t key_size;
    uint32_t number;
    uint32_t parent; /* ZCR_NONE for module 0 */
    uint32_t end;    /* modules [number, end) are this one and all below it */
    uint32_t place;  /* among its parent's children of every kind */
    uint32_t first_tensor, tensors;       /* its own: zcr_module_tensor */
    uint32_t first_attribute, attributes; /* its own: zcr_attribute_at(archive, first_attribute + i) */
    uint8_t kind;                         /* one that is not known is a mapping */
} zcr_module;

/* One value that is no tensor, or a list or tuple of `count` values of one type. */
typedef struct zcr_attribute {
    const zcr_archive *archive;
    const char *name; /* the key alone, UTF-8, followed by NUL */
    const unsigned char *words;
    uint32_t name_size;
    uint32_t count;  /* values; 1 for a scalar */
    uint32_t parent; /* ZCR_NONE in metadata */
    uint32_t place;
    uint8_t type;
    uint8_t form;
} zcr_attribute;

static inline uint32_t zcr_module_count(const zcr_archive *a)
{
    return a->v[ZCR_V_MODULES].count;
}
static inline uint32_t zcr_attribute_count(const zcr_archive *a)
{
    return a->v[ZCR_V_ATTRIBUTES].count;
}
static inline uint32_t zcr_metadata_count(const zcr_archive *a)
{
    return a->v[ZCR_V_METADATA].count;
}

/* Finds module i; they are in pre-order, module 0 is the record itself. */
ZCR_FUNCTION zcr_status zcr_module_at(const zcr_archive *a, uint32_t i, zcr_module *m)
{
    const uint32_t count = a->v[ZCR_V_MODULES].count;
    const unsigned char *e;
    uint32_t last;
    if (i >= count) {
        return ZCR_NOT_FOUND;
    }
    e = zcr_row(a, ZCR_V_MODULES, i, 48);
    last = i + 1 == count;
    m->archive = a;
    m->name = (const char *)zcr_span(a, e);
    m->type_name = (const char *)zcr_span(a, e + 8);
    m->name_size = ZCR_LOAD32(e + 4);
    m->type_name_size = ZCR_LOAD32(e + 12);
    m->key_size = ZCR_LOAD32(e + 16);
    m->number = i;
    m->parent = ZCR_LOAD32(e + 20);
    m->end = ZCR_LOAD32(e + 24);
    m->place = ZCR_LOAD32(e + 28);
    m->first_tensor = ZCR_LOAD32(e + 32);
    m->tensors = (last ? a->v[ZCR_V_TENSORS].count : ZCR_LOAD32(e + 48 + 32)) - m->first_tensor;
    m->first_attribute = ZCR_LOAD32(e + 36);
    m->attributes = (last ? a->v[ZCR_V_ATTRIBUTES].count : ZCR_LOAD32(e + 48 + 36)) - m->first_attribute;
    m->kind = e[40];
    if (!m->name || !m->type_name) {
        return 27;
    }
    return m->key_size > m->name_size ? 34 : ZCR_OK;
}

/* Finds the module of a full name; of an empty one module 0. Looks at the modules on the way, and at their siblings. */
ZCR_FUNCTION zcr_status zcr_find_module(const zcr_archive *a, const char *name, size_t name_size, zcr_module *m)
{
    uint32_t i = 0;
    for (;;) {
        zcr_status status = zcr_module_at(a, i, m);
        if (status) {
            return status;
        }
        if (m->name_size <= name_size &&
            !zcr_compare((const unsigned char *)m->name, (size_t)m->name_size, (const unsigned char *)name,
                         (size_t)m->name_size)) {
            if (m->name_size == name_size) {
                return ZCR_OK;
            }
            if (!i || name[m->name_size] == '.') { /* it may be below this one */
                i++;
                continue;
            }
        }
        i = m->end > i ? m->end : i + 1;
    }
}

/* Finds tensor i of those that are a module's own, in saved order. */
static inline zcr_status zcr_module_tensor(const zcr_module *m, uint32_t i, zcr_tensor *t)
{
    const zcr_vector *order = &m->archive->v[ZCR_V_BY_MODULE];
    if (i >= m->tensors) {
        return ZCR_NOT_FOUND;
    }
    i += m->first_tensor;
    return zcr_tensor_at(m->archive, i < order->count ? ZCR_LOAD32(order->items + (size_t)i * 4) : i, t);
}

ZCR_FUNCTION zcr_status zcr_value_at(const zcr_archive *a, unsigned vector, uint32_t i, zcr_attribute *found)
{
    const unsigned char *e;
    if (i >= a->v[vector].count) {
        return ZCR_NOT_FOUND;
    }
    e = zcr_row(a, vector, i, 32);
    found->archive = a;
    found->name = (const char *)zcr_span(a, e);
    found->name_size = ZCR_LOAD32(e + 4);
    found->parent = ZCR_LOAD32(e + 16);
    found->place = ZCR_LOAD32(e + 20);
    found->type = e[24];
    found->form = e[25];
    found->words = e + 8;
    found->count = 1;
    if (found->form) {
        found->count = ZCR_LOAD32(e + 12);
        found->words = zcr_range(a, ZCR_V_WORDS, ZCR_LOAD32(e + 8), found->count);
    }
    if (!found->words) {
        return 67;
    }
    return found->name ? ZCR_OK : 27;
}

/* Finds attribute i; they ascend by module and place. */
static inline zcr_status zcr_attribute_at(const zcr_archive *a, uint32_t i, zcr_attribute *found)
{
    return zcr_value_at(a, ZCR_V_ATTRIBUTES, i, found);
}

/* Finds what is stored about the file; its names ascend. */
static inline zcr_status zcr_metadata_at(const zcr_archive *a, uint32_t i, zcr_attribute *found)
{
    return zcr_value_at(a, ZCR_V_METADATA, i, found);
}

ZCR_FUNCTION zcr_status zcr_find_value(const zcr_archive *a, unsigned vector, uint32_t first, uint32_t count,
                                       const char *name, size_t name_size, zcr_attribute *found)
{
    uint32_t i;
    for (i = 0; i < count; i++) {
        zcr_status status = zcr_value_at(a, vector, first + i, found);
        if (status || !zcr_compare((const unsigned char *)found->name, (size_t)found->name_size,
                                   (const unsigned char *)name, name_size)) {
            return status;
        }
    }
    return ZCR_NOT_FOUND;
}

/* Finds a module's attribute by its key, looking through all that the module has. */
static inline zcr_status zcr_find_attribute(const zcr_module *m, const char *key, size_t key_size, zcr_attribute *found)
{
    return zcr_find_value(m->archive, ZCR_V_ATTRIBUTES, m->first_attribute, m->attributes, key, key_size, found);
}

/* Finds what is stored about the file under a name, looking through all of it. */
static inline zcr_status zcr_find_metadata(const zcr_archive *a, const char *name, size_t name_size,
                                           zcr_attribute *found)
{
    return zcr_find_value(a, ZCR_V_METADATA, 0, a->v[ZCR_V_METADATA].count, name, name_size, found);
}

/* Returns value i as its 64 bits; 0 for one that is not below the count. */
static inline uint64_t zcr_word(const zcr_attribute *at, uint32_t i)
{
    return i < at->count ? ZCR_LOAD64(at->words + (size_t)i * 8) : 0;
}

/* Value i of an attribute as C's own type. An integer of either kind is given where it fits. */
static inline zcr_status zcr_bool_value(const zcr_attribute *at, uint32_t i, int *value)
{
    if (i >= at->count || at->type != ZCR_VALUE_BOOL) {
        return i >= at->count ? ZCR_NOT_FOUND : ZCR_UNSUPPORTED;
    }
    *value = zcr_word(at, i) != 0;
    return ZCR_OK;
}
static inline zcr_status zcr_int_value(const zcr_attribute *at, uint32_t i, int64_t *value)
{
    uint64_t word;
    if (i >= at->count || (at->type != ZCR_VALUE_INT && at->type != ZCR_VALUE_UINT)) {
        return i >= at->count ? ZCR_NOT_FOUND : ZCR_UNSUPPORTED;
    }
    word = zcr_word(at, i);
    if (word >> 63 && at->type == ZCR_VALUE_UINT) {
        return ZCR_UNSUPPORTED;
    }
    *value = word >> 63 ? -(int64_t)~word - 1 : (int64_t)word;
    return ZCR_OK;
}
static inline zcr_status zcr_uint_value(const zcr_attribute *at, uint32_t i, uint64_t *value)
{
    uint64_t word;
    if (i >= at->count || (at->type != ZCR_VALUE_INT && at->type != ZCR_VALUE_UINT)) {
        return i >= at->count ? ZCR_NOT_FOUND : ZCR_UNSUPPORTED;
    }
    word = zcr_word(at, i);
    if (word >> 63 && at->type == ZCR_VALUE_INT) {
        return ZCR_UNSUPPORTED;
    }
    *value = word;
    return ZCR_OK;
}
/* Not where C's double has another size, as on AVR: there zcr_word has the bits. */
static inline zcr_status zcr_float_value(const zcr_attribute *at, uint32_t i, double *value)
{
    unsigned char *const to = (unsigned char *)value;
    unsigned k;
    if (i >= at->count || at->type != ZCR_VALUE_FLOAT || sizeof *value != 8) {
        return i >= at->count ? ZCR_NOT_FOUND : ZCR_UNSUPPORTED;
    }
    for (k = 0; k < sizeof *value; k++) {
        to[k] = at->words[(size_t)i * 8 + k];
    }
    return ZCR_OK;
}
/* UTF-8, followed by NUL, and perhaps with others inside. */
static inline zcr_status zcr_text_value(const zcr_attribute *at, uint32_t i, const char **text, uint32_t *size)
{
    const unsigned char *found;
    if (i >= at->count || at->type != ZCR_VALUE_TEXT) {
        return i >= at->count ? ZCR_NOT_FOUND : ZCR_UNSUPPORTED;
    }
    found = zcr_span(at->archive, at->words + (size_t)i * 8);
    if (!found) {
        return 68;
    }
    *text = (const char *)found;
    *size = ZCR_LOAD32(at->words + (size_t)i * 8 + 4);
    return ZCR_OK;
}
/* NULL and 0 for no bytes. */
static inline zcr_status zcr_bytes_value(const zcr_attribute *at, uint32_t i, const unsigned char **data,
                                         size_t *nbytes)
{
    uint32_t number;
    if (i >= at->count || at->type != ZCR_VALUE_BYTES) {
        return i >= at->count ? ZCR_NOT_FOUND : ZCR_UNSUPPORTED;
    }
    number = ZCR_LOAD32(at->words + (size_t)i * 8);
    *data = NULL;
    *nbytes = 0;
    if (number == ZCR_NONE) {
        return ZCR_OK;
    }
    return number < at->archive->v[ZCR_V_PAYLOADS].count ? zcr_load_payload(at->archive, number, data, nbytes) : 68;
}

enum { ZCR_CHILD_TENSOR, ZCR_CHILD_MODULE, ZCR_CHILD_ATTRIBUTE, ZCR_CHILD_KINDS };

/* A walk through a module's children of every kind in the order of their places. */
typedef struct zcr_children {
    zcr_module module;
    uint32_t place;                  /* of the next one */
    uint32_t count;                  /* of those in `order` */
    uint32_t next[ZCR_CHILD_KINDS];  /* where each kind goes on, as long as places ascend in it */
    const uint32_t *order;           /* by place, see zcr_walk_ordered; or NULL */
} zcr_children;

/* One child of a module: which of the three is there, `kind` says. */
typedef struct zcr_child {
    unsigned kind;
    zcr_tensor tensor;
    zcr_module module;
    zcr_attribute attribute;
} zcr_child;

/* Where one child lies: no more of it than a search has to read. */
typedef struct zcr_child_entry {
    uint32_t number; /* among all of its kind */
    uint32_t place;
    uint32_t next;   /* the `i` of the next one of its kind */
} zcr_child_entry;

/* Finds where a module's child `i` of one kind lies: i counts its tensors or attributes from 0, or is the number of a
 * module, the first one that of the module itself and 1. */
ZCR_FUNCTION zcr_status zcr_child_at(const zcr_module *m, unsigned kind, uint32_t i, zcr_child_entry *entry)
{
    const zcr_archive *const a = m->archive;
    const zcr_vector *const order = &a->v[ZCR_V_BY_MODULE];
    entry->next = i + 1;
    if (kind == ZCR_CHILD_TENSOR) {
        if (i >= m->tensors) {
            return ZCR_NOT_FOUND;
        }
        i += m->first_tensor;
        entry->number = i < order->count ? ZCR_LOAD32(order->items + (size_t)i * 4) : i;
        if (entry->number >= a->v[ZCR_V_TENSORS].count) {
            return 42;
        }
        entry->place = ZCR_LOAD32(zcr_row(a, ZCR_V_TENSORS, entry->number, 48) + 16);
    } else if (kind == ZCR_CHILD_ATTRIBUTE) {
        if (i >= m->attributes) {
            return ZCR_NOT_FOUND;
        }
        entry->number = i + m->first_attribute;
        if (entry->number >= a->v[ZCR_V_ATTRIBUTES].count) {
            return 43;
        }
        entry->place = ZCR_LOAD32(zcr_row(a, ZCR_V_ATTRIBUTES, entry->number, 32) + 20);
    } else {
        const unsigned char *row;
        if (i >= m->end) {
            return ZCR_NOT_FOUND;
        }
        if (i >= a->v[ZCR_V_MODULES].count) {
            return 38;
        }
        row = zcr_row(a, ZCR_V_MODULES, i, 48);
        entry->number = i;
        entry->place = ZCR_LOAD32(row + 28);
        if (ZCR_LOAD32(row + 24) > i) {
            entry->next = ZCR_LOAD32(row + 24);
        }
    }
    return ZCR_OK;
}

static inline uint32_t zcr_first_child(const zcr_module *m, unsigned kind)
{
    return kind == ZCR_CHILD_MODULE ? m->number + 1 : 0;
}

/* Starts a walk through the children of module i. */
static inline zcr_status zcr_walk(const zcr_archive *a, uint32_t i, zcr_children *walk)
{
    const zcr_status status = zcr_module_at(a, i, &walk->module);
    unsigned kind;
    walk->place = walk->count = 0;
    walk->order = NULL;
    for (kind = 0; kind < ZCR_CHILD_KINDS; kind++) {
        walk->next[kind] = status ? 0 : zcr_first_child(&walk->module, kind);
    }
    return status;
}

/* Starts the same walk, whose time then grows with the children alone, in whatever order they were saved: `order` is
 * memory of 4 bytes for each child, on a multiple of 4, to be kept as long as the walk; ZCR_SCRATCH where it is too
 * little. As much as zcr_verify_scratch says is enough for any module. */
static inline zcr_status zcr_walk_ordered(const zcr_archive *a, uint32_t i, void *order, size_t order_size,
                                          zcr_children *walk)
{
    uint32_t *const numbers = (uint32_t *)order;
    uint32_t count = 0, before = 0, at;
    zcr_status status = zcr_walk(a, i, walk);
    unsigned pass, kind;
    zcr_child_entry entry;
    if (status) {
        return status;
    }
    if ((uintptr_t)order & 3) {
        return ZCR_SCRATCH;
    }
    for (pass = 0; pass < 2; pass++) { /* how many there are; then each into its place */
        for (kind = 0, before = 0; kind < ZCR_CHILD_KINDS; kind++) {
            for (at = zcr_first_child(&walk->module, kind);; at = entry.next) {
                status = zcr_child_at(&walk->module, kind, at, &entry);
                if (status == ZCR_NOT_FOUND) {
                    break;
                }
                if (status) {
                    return status;
                }
                if (!pass) {
                    if (order_size / 4 <= count) {
                        return ZCR_SCRATCH;
                    }
                    numbers[(size_t)count++] = ZCR_NONE;
                } else if (entry.place >= count || numbers[(size_t)entry.place] != ZCR_NONE) {
                    return 44;
                } else {
                    numbers[(size_t)entry.place] = before + entry.number;
                }
            }
            before += kind == ZCR_CHILD_TENSOR ? a->v[ZCR_V_TENSORS].count : a->v[ZCR_V_MODULES].count;
        }
    }
    walk->order = numbers;
    walk->count = count;
    return ZCR_OK;
}

/* Finds what is next in the order of places, by its kind and number. */
static inline zcr_status zcr_next_child(zcr_children *walk, unsigned *kind, zcr_child_entry *entry)
{
    const zcr_vector *const v = walk->module.archive->v;
    unsigned all;
    if (walk->order) {
        if (walk->place >= walk->count) {
            return ZCR_NOT_FOUND;
        }
        entry->number = walk->order[(size_t)walk->place];
        *kind = ZCR_CHILD_TENSOR;
        if (entry->number >= v[ZCR_V_TENSORS].count) {
            entry->number -= v[ZCR_V_TENSORS].count;
            *kind = ZCR_CHILD_MODULE;
            if (entry->number >= v[ZCR_V_MODULES].count) {
                entry->number -= v[ZCR_V_MODULES].count;
                *kind = ZCR_CHILD_ATTRIBUTE;
            }
        }
        return ZCR_OK;
    }
    for (all = 0; all < 2; all++) { /* first the one of each kind that ought to be it */
        for (*kind = 0; *kind < ZCR_CHILD_KINDS; ++*kind) {
            uint32_t i = all ? zcr_first_child(&walk->module, *kind) : walk->next[*kind];
            do {
                const zcr_status status = zcr_child_at(&walk->module, *kind, i, entry);
                if (status == ZCR_NOT_FOUND) {
                    break;
                }
                if (status || entry->place == walk->place) {
                    walk->next[*kind] = entry->next;
                    return status;
                }
                i = entry->next;
            } while (all);
        }
    }
    return ZCR_NOT_FOUND;
}

/* Finds the next child, ZCR_NOT_FOUND after the last. A step takes no search where each kind of children was saved in
 * the order of its places, as our writer does, or after zcr_walk_ordered. Otherwise it may look at the places of all:
 * the walk is quadratic in their number. After any other status there is no going on. */
ZCR_FUNCTION zcr_status zcr_next(zcr_children *walk, zcr_child *child)
{
    const zcr_archive *const a = walk->module.archive;
    zcr_child_entry entry;
    const zcr_status status = zcr_next_child(walk, &child->kind, &entry);
    if (status) {
        return status;
    }
    walk->place++;
    if (child->kind == ZCR_CHILD_TENSOR) {
        return zcr_tensor_at(a, entry.number, &child->tensor);
    }
    return child->kind == ZCR_CHILD_MODULE ? zcr_module_at(a, entry.number, &child->module)
                                           : zcr_attribute_at(a, entry.number, &child->attribute);
}

/* ---- Verifying payloads ---------------------------------------------------------------------------------------- */

/* XXH3, 64 bits, seed 0, by the specification of its author (xxHash, doc/xxhash_spec.md). */
static inline uint64_t zcr_load_any64(const unsigned char *p)
{
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 | (uint64_t)p[4] << 32 |
           (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 | (uint64_t)p[7] << 56;
}

static inline uint32_t zcr_load_any32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Returns the two halves of the 128-bit product, one xor the other. */
static inline uint64_t zcr_xxh3_fold(uint64_t a, uint64_t b)
{
    const uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    const uint64_t low = a0 * b0, left = a1 * b0 + (low >> 32), right = a0 * b1 + (uint32_t)left;
    return (a1 * b1 + (left >> 32) + (right >> 32)) ^ (right << 32 | (uint32_t)low);
}

static inline uint64_t zcr_xxh3_mix(const unsigned char *p, const unsigned char *secret)
{
    return zcr_xxh3_fold(zcr_load_any64(p) ^ zcr_load_any64(secret),
                         zcr_load_any64(p + 8) ^ zcr_load_any64(secret + 8));
}

static inline uint64_t zcr_xxh3_end(uint64_t h)
{
    h ^= h >> 37;
    h *= 0x165667919E3779F9u;
    return h ^ h >> 32;
}

static inline uint64_t zcr_xxh64_end(uint64_t h)
{
    h ^= h >> 33;
    h *= 0xC2B2AE3D27D4EB4Fu;
    h ^= h >> 29;
    h *= 0x165667B19E3779F9u;
    return h ^ h >> 32;
}

/* More than 240 bytes: eight sums over stripes of 64 bytes, stirred after each 16 of them. */
ZCR_FUNCTION uint64_t zcr_xxh3_long(const unsigned char *p, size_t size, const unsigned char *secret)
{
    uint64_t sums[8], h = (uint64_t)size * 0x9E3779B185EBCA87u;
    const size_t stripes = (size - 1) / 64;
    size_t stripe;
    unsigned i;
    sums[0] = 0xC2B2AE3Du;
    sums[1] = 0x9E3779B185EBCA87u;
    sums[2] = 0xC2B2AE3D27D4EB4Fu;
    sums[3] = 0x165667B19E3779F9u;
    sums[4] = 0x85EBCA77C2B2AE63u;
    sums[5] = 0x85EBCA77u;
    sums[6] = 0x27D4EB2F165667C5u;
    sums[7] = 0x9E3779B1u;
    for (stripe = 0; stripe <= stripes; stripe++) {
        const unsigned char *const at = stripe < stripes ? p + stripe * 64 : p + (size - 64);
        const unsigned char *const key = secret + (stripe < stripes ? stripe % 16 * 8 : 121);
        for (i = 0; i < 8; i++) {
            const uint64_t value = zcr_load_any64(at + 8 * i), mixed = value ^ zcr_load_any64(key + 8 * i);
            sums[i ^ 1] += value;
            sums[i] += (uint64_t)(uint32_t)mixed * (mixed >> 32);
        }
        if (stripe % 16 == 15 && stripe < stripes) {
            for (i = 0; i < 8; i++) {
                sums[i] = (sums[i] ^ sums[i] >> 47 ^ zcr_load_any64(secret + 128 + 8 * i)) * 0x9E3779B1u;
            }
        }
    }
    for (i = 0; i < 8; i += 2) {
        h += zcr_xxh3_fold(sums[i] ^ zcr_load_any64(secret + 11 + 8 * i),
                           sums[i + 1] ^ zcr_load_any64(secret + 19 + 8 * i));
    }
    return zcr_xxh3_end(h);
}

ZCR_FUNCTION uint64_t zcr_xxh3(const unsigned char *p, size_t size)
{
    static const unsigned char secret[192] = {
        0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
        0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
        0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
        0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
        0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
        0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
        0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
        0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
        0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
        0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
        0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
    uint64_t h = (uint64_t)size * 0x9E3779B185EBCA87u, low, high;
    size_t i;
    if (size > 240) {
        return zcr_xxh3_long(p, size, secret);
    }
    if (size > 128) {
        low = zcr_xxh3_mix(p + (size - 16), secret + 119);
        for (i = 0; i < 8; i++) {
            h += zcr_xxh3_mix(p + 16 * i, secret + 16 * i);
        }
        h = zcr_xxh3_end(h);
        for (; i < size / 16; i++) {
            low += zcr_xxh3_mix(p + 16 * i, secret + 16 * (i - 8) + 3);
        }
        return zcr_xxh3_end(h + low);
    }
    if (size > 16) {
        for (i = (size - 1) / 32 + 1; i--;) {
            h += zcr_xxh3_mix(p + 16 * i, secret + 32 * i);
            h += zcr_xxh3_mix(p + (size - 16 * (i + 1)), secret + 32 * i + 16);
        }
        return zcr_xxh3_end(h);
    }
    if (size > 8) {
        low = zcr_load_any64(p) ^ zcr_load_any64(secret + 24) ^ zcr_load_any64(secret + 32);
        high = zcr_load_any64(p + (size - 8)) ^ zcr_load_any64(secret + 40) ^ zcr_load_any64(secret + 48);
        h = size + high + zcr_xxh3_fold(low, high);
        high = 0; /* `low` with its bytes in the other order; by constant shifts, or small cores call for them */
        for (i = 0; i < 8; i++) {
            high = high << 8 | (low & 255);
            low >>= 8;
        }
        return zcr_xxh3_end(h + high);
    }
    if (size > 3) {
        h = zcr_load_any32(p + (size - 4)) | (uint64_t)zcr_load_any32(p) << 32;
        h ^= zcr_load_any64(secret + 8) ^ zcr_load_any64(secret + 16);
        h ^= (h << 49 | h >> 15) ^ (h << 24 | h >> 40);
        h *= 0x9FB21C651E98DF25u;
        h ^= (h >> 35) + size;
        h *= 0x9FB21C651E98DF25u;
        return h ^ h >> 28;
    }
    if (size) {
        h = (uint64_t)p[0] << 16 | (uint64_t)p[size / 2] << 24 | p[size - 1] | (uint64_t)size << 8;
        return zcr_xxh64_end(h ^ zcr_load_any32(secret) ^ zcr_load_any32(secret + 4));
    }
    return zcr_xxh64_end(zcr_load_any64(secret + 56) ^ zcr_load_any64(secret + 64));
}

static inline int zcr_is_zero(const unsigned char *p, const unsigned char *end)
{
    while (p < end) {
        if (*p++) {
            return 0;
        }
    }
    return 1;
}

/* Returns the number of the first payload of the very same range: neighbours, and payloads ascend by offset. */
static inline uint32_t zcr_first_alike(const zcr_archive *a, uint32_t number)
{
    const uint64_t offset = ZCR_LOAD64(zcr_row(a, ZCR_V_PAYLOADS, number, 24));
    uint32_t low = 0, high = number;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (ZCR_LOAD64(zcr_row(a, ZCR_V_PAYLOADS, middle, 24)) < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* What is known of a payload's bytes, as a tensor of one type or another needs it: each is found out once. */
enum { ZCR_ALL_STRINGS = 1, ZCR_ALL_BOOLS = 2 };

/* Checks one tensor's bytes: pad bits, ends of strings, bools (R70 to R72). `known` has a byte for each payload, of
 * which those of the very same range share one. */
ZCR_FUNCTION zcr_status zcr_check_elements(const zcr_tensor *t, unsigned char *known)
{
    if (!t->first) {
        return ZCR_OK;
    }
    known += (size_t)zcr_first_alike(t->archive, zcr_payload_number(t));
    if (t->bits && t->bits < 8 && t->bits == zcr_natural_width(t->dtype)) {
        const unsigned used = (unsigned)(zcr_count(t) % 8) * t->bits % 8;
        return used && t->first[t->nbytes - 1] >> used ? 70 : ZCR_OK;
    }
    if (t->dtype == ZCR_STRING) {
        const size_t count = (size_t)zcr_count(t), room = t->nbytes - (count + 1) * 8;
        const unsigned char *const ends = t->first + room;
        size_t last = zcr_load_size(ends + count * 8), i;
        if (last > room || room - last >= 8) { /* so there is one count that goes with these bytes */
            return 71;
        }
        if (*known & ZCR_ALL_STRINGS) {
            return ZCR_OK;
        }
        if (!zcr_is_zero(t->first + last, ends) || !zcr_is_zero(ends, ends + 8)) {
            return 71;
        }
        for (i = 0; i < count; i++) {
            if (zcr_load_size(ends + 8 * i) > zcr_load_size(ends + 8 * i + 8)) {
                return 71;
            }
        }
        *known |= ZCR_ALL_STRINGS;
    }
    if (t->dtype == ZCR_BOOL && !(*known & ZCR_ALL_BOOLS)) { /* of the whole payload: its views may be very many */
        const unsigned char *data = NULL;
        size_t nbytes = 0, i;
        const zcr_status status = zcr_payload(t->archive, zcr_payload_number(t), &data, &nbytes);
        if (status) {
            return status;
        }
        for (i = 0; i < nbytes; i++) {
            if (data[i] > 1) {
                return 72;
            }
        }
        *known |= ZCR_ALL_BOOLS;
    }
    return ZCR_OK;
}

/* Checks what only the payloads' bytes can tell, of an archive that zcr_verify has passed: their digests, the zeros
 * between them, pad bits, strings, bools (R70 to R74). `scratch` is as for zcr_verify. Reads every byte once for its
 * digest, and once for each of the types string and bool. */
ZCR_FUNCTION zcr_status zcr_verify_payloads(const zcr_archive *a, void *scratch, size_t scratch_size)
{
    unsigned char *const known = (unsigned char *)scratch;
    const size_t index = a->extent[ZCR_E_INDEX], front = index < a->extent[ZCR_E_PAYLOADS];
    const unsigned char *done = a->base + (front ? index + a->extent[ZCR_E_INDEX_SIZE] : 64), *data = NULL;
    const unsigned char *const end = a->base + (front ? a->extent[ZCR_E_SIZE] - 64 : index);
    const uint32_t count = a->v[ZCR_V_PAYLOADS].count;
    zcr_tensor t;
    zcr_status status;
    size_t nbytes = 0;
    uint32_t i;
    if (scratch_size < zcr_verify_scratch(a)) {
        return ZCR_SCRATCH;
    }
    for (i = 0; i < count; i++) {
        known[(size_t)i] = 0;
        status = zcr_load_payload(a, i, &data, &nbytes);
        if (status) {
            return status;
        }
        if (data < done) { /* the very same range as the one before, with the same digest */
            continue;
        }
        if (!zcr_is_zero(done, data)) {
            return 74;
        }
        done = data + nbytes;
        if (a->v[ZCR_V_DIGEST_KIND].count &&
            zcr_xxh3(data, nbytes) != ZCR_LOAD64(zcr_row(a, ZCR_V_PAYLOADS, i, 24) + 16)) {
            return 73;
        }
    }
    if (!zcr_is_zero(done, end)) {
        return 74;
    }
    for (i = 0; i < a->v[ZCR_V_TENSORS].count; i++) {
        status = zcr_load_tensor(a, i, &t);
        if (!status) {
            status = zcr_check_elements(&t, known);
        }
        if (status) {
            return status;
        }
    }
    return ZCR_OK;
}

/* ---- Words ----------------------------------------------------------------------------------------------------- */

/* Returns what kind of failure a status is. */
static inline unsigned zcr_kind(zcr_status status)
{
    switch (status) {
    case ZCR_OK:
        return ZCR_KIND_OK;
    case 1:
        return ZCR_KIND_NOT_AN_ARCHIVE;
    case 2:
    case 7:
        return ZCR_KIND_VERSION;
    case 3:
    case 17:
    case 73:
        return ZCR_KIND_INTEGRITY;
    case 8:
    case 14:
    case 15:
    case 16:
        return ZCR_KIND_TRUNCATED;
    case 9:
    case 30:
    case 31:
    case 40:
    case 47:
    case 49:
        return ZCR_KIND_LIMIT;
    case ZCR_NOT_FOUND:
        return ZCR_KIND_NOT_FOUND;
    case ZCR_UNSUPPORTED:
        return ZCR_KIND_UNSUPPORTED;
    case ZCR_MISALIGNED:
        return ZCR_KIND_MISALIGNED;
    case ZCR_SCRATCH:
        return ZCR_KIND_SCRATCH;
    default:
        return ZCR_KIND_FORMAT;
    }
}

/* Returns what to tell a person about a status; its number, below 100, is the rule of FORMAT.md that is broken. */
static inline const char *zcr_explain(zcr_status status)
{
    if (status == 15) {
        return "the archive's header does not say its size, as after writing to a pipe (open the whole of it, or save "
               "it to a file), or says more than there is";
    }
    if (status == 2) {
        return "a version of the format that this reader does not know: a later one, or the draft, version 0, of which "
               "`zcrecord convert` makes version 1";
    }
    switch (zcr_kind(status)) {
    case ZCR_KIND_OK:
        return "success";
    case ZCR_KIND_NOT_AN_ARCHIVE:
        return "not a zcrecord archive: it does not begin and end as one";
    case ZCR_KIND_TRUNCATED:
        return "the archive has another size than the memory it is said to fill, or its ends differ; copy it again";
    case ZCR_KIND_VERSION:
        return "it needs a feature that this reader does not know; use a later zcrecord.h";
    case ZCR_KIND_INTEGRITY:
        return "a checksum does not match: the archive is damaged, copy it again";
    case ZCR_KIND_LIMIT:
        return "larger or nested deeper than the format allows";
    case ZCR_KIND_NOT_FOUND:
        return "there is nothing of that name or number";
    case ZCR_KIND_UNSUPPORTED:
        return "it has another type than was asked for";
    case ZCR_KIND_MISALIGNED:
        return "the archive's address is not a multiple of 8; align the memory that holds it: alignas(64)";
    case ZCR_KIND_SCRATCH:
        return "the memory to verify with is smaller than zcr_verify_scratch, or not aligned to 4";
    default:
        return "the archive is malformed: the status is the number of the rule of FORMAT.md that it breaks";
    }
}

#ifdef __cplusplus
}
#if defined(__GNUC__) || defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#endif
