/* Every input through zcrecord.h under libFuzzer, and what makes inputs that get past its checksums.
 *
 * An input is an archive, perhaps among other bytes; its last bytes say how it is opened and what is checked. With
 * FUZZ_RUST zcrecord.rs reads it, too, and both have to say the same. The mutator changes what the index says, column
 * by column, and makes the CRCs right again, mostly the digests as well: without that no input would reach a rule. */
#define main checker_main
#include "checker.c"
#undef main

#ifdef FUZZ_RUST
/* What zcrecord.rs says: 0, or 1 and the CRC of what `dump` writes. It is the static library of tests/programs/rust/fuzz.rs. */
int fuzz_rust(const unsigned char *data, size_t size, char mode, char level, uint32_t *crc);
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

static uint32_t load32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t load64(const uint8_t *p)
{
    return load32(p) | (uint64_t)load32(p + 4) << 32;
}

static void store(uint8_t *p, uint64_t value, unsigned width)
{
    unsigned i;
    for (i = 0; i < width; i++) p[i] = (uint8_t)(value >> 8 * i);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    /* The CRC that ends a trailer is as good as a throw of dice, and the same whenever the input is. */
    const uint32_t dice = size < 4 ? 0 : load32(data + size - 4);
    const char mode = "wwwwwwps"[dice & 7], level = "oiffffff"[dice >> 3 & 7];
    const size_t skip = skipped(data, size, mode);
    zcr_status status;
    void *block;
    if (posix_memalign(&block, 64, skip + size + !size)) return 0;
    memcpy((uint8_t *)block + skip, data, size);
    status = examine((const unsigned char *)block + skip, size, mode, level);
#ifdef FUZZ_RUST
    {
        uint32_t crc = 0;
        const int accepted = fuzz_rust((const unsigned char *)block + skip, size, mode, level, &crc);
        if (accepted != !status || (accepted && crc != text_crc())) {
            fprintf(stderr, "zcrecord.h: R%u, %08" PRIx32 "; zcrecord.rs: %d, %08" PRIx32 "\n", status, text_crc(),
                    accepted, crc);
            abort();
        }
    }
#else
    (void)status;
#endif
    free(block);
    return 0;
}

/* Where the parts of an input lie. */
typedef struct {
    uint8_t *base, *index, *payloads;
    size_t size, index_size, payloads_size;
    int sealed;
} parts;

static int take_apart(uint8_t *data, size_t size, parts *found)
{
    const uint8_t *end = data + size - 64;
    uint64_t archive_size, index_offset, index_size, payload_offset;
    if (size < 128) return 0;
    archive_size = load64(data + 48);
    found->sealed = archive_size != 0;
    if (found->sealed && archive_size >= 128 && archive_size <= size) end = data + archive_size - 64;
    archive_size = load64(end + 48);
    index_offset = load64(end + 24);
    index_size = load64(end + 32);
    payload_offset = load64(end + 40);
    if (archive_size < 128 || archive_size > (size_t)(end + 64 - data)) return 0;
    found->base = data + ((size_t)(end + 64 - data) - (size_t)archive_size);
    found->sealed = load64(found->base + 48) != 0;
    found->size = (size_t)archive_size;
    if (index_offset > archive_size - 64 || index_size > archive_size - 64 - index_offset || index_size < 16) return 0;
    if (payload_offset > archive_size - 64) return 0;
    found->index = found->base + index_offset;
    found->index_size = (size_t)index_size;
    found->payloads = found->base + payload_offset;
    found->payloads_size =
        (size_t)((index_offset > payload_offset ? index_offset : archive_size - 64) - payload_offset);
    return 1;
}

/* The items of a vector, cut off where the index ends; NULL without one. */
static uint8_t *vector(const parts *p, unsigned id, unsigned item, size_t *count)
{
    const size_t size = p->index_size;
    uint32_t table = load32(p->index), vtable, at;
    *count = 0;
    if (table > size - 4) return NULL;
    vtable = table - load32(p->index + table);
    if (vtable > size - 4) return NULL;
    at = p->index[vtable] | (uint32_t)p->index[vtable + 1] << 8;
    if (at > size - vtable || 4 + 2 * id + 2 > at) return NULL;
    at = p->index[vtable + 4 + 2 * id] | (uint32_t)p->index[vtable + 5 + 2 * id] << 8;
    if (!at || at > size - table || size - table - at < 4) return NULL;
    at += table;
    at += load32(p->index + at);
    if (at > size - 4) return NULL;
    *count = load32(p->index + at);
    if (*count > (size - at - 4) / item) *count = (size - at - 4) / item;
    return p->index + at + 4;
}

static uint64_t state;

static uint32_t random_below(uint64_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? (uint32_t)((state >> 20) % n) : 0;
}

/* A number that rules are about: small, near a power of two, near the old one, or near a size of the input. */
static uint64_t telling(uint64_t old, size_t size)
{
    switch (random_below(8)) {
    case 0: return random_below(8);
    case 1: return ((uint64_t)1 << random_below(64)) - random_below(3);
    case 2: return old + 1;
    case 3: return old - 1;
    case 4: return 0 - (uint64_t)random_below(4);
    case 5: return random_below(size) / 8 * 8;
    case 6: return old ^ (uint64_t)1 << random_below(64);
    default: return random_below(256);
    }
}

static const unsigned items[] = {0, 1, 8, 8, 8, 24, 48, 4, 4, 48, 32, 32};

/* Changes one number of the index, mostly one of a vector that is picked first, so that short ones have their share. */
static void change_number(const parts *p)
{
    const unsigned id = 1 + random_below(11);
    size_t count = 0, place, row;
    uint8_t *start = random_below(4) ? vector(p, id, items[id], &count) : NULL;
    unsigned width;
    if (!count) {
        start = p->index;
        count = p->index_size;
        row = 1;
    } else row = items[id];
    place = random_below(count) * row + random_below(row);
    width = row == 1 || row % 8 ? 4 : 8;
    if (row == 1 && id == 1) width = 1;
    if (row > 8) width = 1u << random_below(4);
    place -= place % width;
    if (place + width > count * row) return;
    if (random_below(4) == 0 && count > 1 && row > 1) { /* what another row says */
        memcpy(start + place, start + random_below(count) * row + place % row, width);
        return;
    }
    store(start + place, telling(width == 8 ? load64(start + place) : start[place], p->size), width);
}

/* Copies rows of one vector over others, or exchanges bytes of the index. */
static void move_rows(const parts *p)
{
    const unsigned id = 1 + random_below(11);
    size_t count = 0, from, to, many;
    uint8_t *start = vector(p, id, items[id], &count);
    if (count < 2) return;
    from = random_below(count);
    to = random_below(count);
    many = 1 + random_below(count - (from > to ? from : to));
    memmove(start + to * items[id], start + from * items[id], many * items[id]);
}

static void mutate_bytes(uint8_t *start, size_t size)
{
    static uint8_t copy[1 << 16];
    const size_t room = size < sizeof copy ? size : sizeof copy;
    if (!room) return;
    memcpy(copy, start, room);
    memcpy(start, copy, LLVMFuzzerMutate(copy, room, room));
}

/* Another count of a vector's items, in place: later bytes become items, or items bytes that mean nothing. */
static void change_count(const parts *p)
{
    const unsigned id = 1 + random_below(11);
    size_t count = 0;
    uint8_t *start = vector(p, id, items[id], &count);
    if (start) store(start - 4, random_below(4) ? count + 1 - random_below(3) : telling(count, p->size), 4);
}

static void change_ends(const parts *p)
{
    uint8_t *last = p->base + p->size - 64;
    static const unsigned fields[] = {24, 32, 40, 48, 16, 24, 32, 40};
    const unsigned at = fields[random_below(8)];
    uint64_t value;
    if (random_below(3) == 0) {
        last[8 + random_below(8)] = (uint8_t)random_below(20);
        if (p->sealed) memcpy(p->base, last, 64);
        return;
    }
    value = load64(last + at) + (uint64_t)(random_below(2) ? 8 : 16) * (random_below(9) - (uint64_t)4);
    store(last + at, random_below(4) ? value : telling(value, p->size), 8);
    if (p->sealed && random_below(8)) store(p->base + at, load64(last + at), 8);
}

static void repair(const parts *p, int digests)
{
    uint8_t *last = p->base + p->size - 64;
    size_t count = 0, i;
    uint8_t *rows = digests ? vector(p, 5, 24, &count) : NULL;
    for (i = 0; i < count; i++, rows += 24) {
        const uint64_t offset = load64(rows), nbytes = load64(rows + 8);
        if (offset > p->payloads_size || nbytes > p->payloads_size - offset) continue;
        store(rows + 16, zcr_xxh3(p->payloads + offset, (size_t)nbytes), 8);
    }
    store(last + 56, zcr_crc32(p->index, p->index_size), 4);
    if (p->sealed) memcpy(p->base + 56, last + 56, 4);
    store(last + 60, zcr_crc32(last, 60), 4);
    store(p->base + 60, zcr_crc32(p->base, 60), 4);
}

/* Puts a few bytes before or behind the archive. */
static size_t surround(uint8_t *data, size_t size, size_t max_size)
{
    const size_t more = 1 + random_below(64);
    if (size + more > max_size) return size;
    if (random_below(2)) {
        memmove(data + more, data, size);
        memset(data, 0, more);
    } else memset(data + size, 0, more);
    return size + more;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    parts found;
    unsigned changes;
    state = seed * 0x9E3779B97F4A7C15u + 1;
    random_below(1);
    if (random_below(64) == 0) return surround(data, size, max_size);
    if (random_below(32) == 0 || !take_apart(data, size, &found)) return LLVMFuzzerMutate(data, size, max_size);
    for (changes = 1 + random_below(2) * random_below(4); changes; changes--) {
        switch (random_below(16)) {
        case 0: mutate_bytes(found.index, found.index_size); break;
        case 1: mutate_bytes(found.payloads, found.payloads_size); break;
        case 2: change_ends(&found); break;
        case 3: change_count(&found); break;
        case 4:
        case 5: move_rows(&found); break;
        default: change_number(&found);
        }
    }
    repair(&found, random_below(4) != 0);
    return size;
}
