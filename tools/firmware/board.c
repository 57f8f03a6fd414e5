/* Start of a Cortex-M3, and semihosting: what board.h promises. The symbols with _ are from board.ld. */

#include "board.h"

#include <stddef.h>

extern uint32_t _data_in_flash[], _data_start[], _data_end[], _bss_start[], _bss_end[], _stack_top[];

enum { PAINT = 0x5AFEC0DE, FAULT_STATUS = 99 };
enum { SYS_WRITE0 = 0x04, SYS_EXIT_EXTENDED = 0x20, APPLICATION_EXIT = 0x20026 };

/* One register, wherever it is. */
static volatile uint32_t *at(uintptr_t address) {
    return (volatile uint32_t *)address;
}

/* ---- start ---- */

/* Flash is memory on this machine and could be written. The protection unit makes it what it is on a real one: a write
   to a weight is a fault. */
static void protect_flash(void) {
    const uint32_t read_only = 6u << 24, four_mib = 21u << 1, enable = 1;
    *at(0xE000ED9C) = 0x10; /* region 0, from address 0 on */
    *at(0xE000EDA0) = read_only | four_mib | enable;
    *at(0xE000ED94) = 4 | enable; /* everything else as without it */
    __asm__ volatile("dsb\n isb" ::: "memory");
}

static void start_clock(void) {
    *at(0x40000008) = 0xFFFFFFFF; /* CMSDK timer 0: reload, then enable */
    *at(0x40000004) = 0xFFFFFFFF;
    *at(0x40000000) = 1;
}

/* The loops go through volatile pointers so that the compiler does not make calls of memcpy of them. */
static void reset(void) {
    const uint32_t *from = _data_in_flash;
    for (volatile uint32_t *to = _data_start; to < _data_end; to++) *to = *from++;
    for (volatile uint32_t *to = _bss_start; to < _bss_end; to++) *to = 0;
    const volatile uint32_t *top = __builtin_frame_address(0);
    for (volatile uint32_t *to = _bss_end; to < top - 16; to++) *to = PAINT; /* 16 words: this frame */
    protect_flash();
    start_clock();
    board_exit((uint32_t)main());
}

static void fault(void) {
    board_text("fault\n");
    board_exit(FAULT_STATUS);
}

struct vectors {
    uint32_t *stack;
    void (*handlers[15])(void);
};

extern const struct vectors vectors;
__attribute__((section(".vectors"), used)) const struct vectors vectors = {
    _stack_top, {reset, fault, fault, fault, fault, fault}};

/* ---- semihosting: a breakpoint that the emulator, or a debugger, answers ---- */

static void call_host(uint32_t operation, const void *argument) {
    register uint32_t r0 __asm__("r0") = operation;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xAB" : "+r"(r0) : "r"(r1) : "memory");
}

void board_text(const char *text) {
    call_host(SYS_WRITE0, text);
}

void board_decimal(uint32_t value) {
    char digits[11];
    size_t start = sizeof digits - 1;
    digits[start] = '\0';
    do {
        digits[--start] = (char)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    board_text(digits + start);
}

void board_hex(uint32_t value) {
    char digits[9];
    for (size_t i = 0; i < 8; i++) digits[i] = "0123456789abcdef"[value >> (28 - 4 * i) & 15];
    digits[8] = '\0';
    board_text(digits);
}

void board_value(const char *name, uint32_t value) {
    board_text(name);
    board_text(" ");
    board_decimal(value);
    board_text("\n");
}

void board_sum(const char *name, uint32_t value, uint32_t count) {
    board_text(name);
    board_text(" ");
    board_decimal(value);
    board_text(" ");
    board_decimal(count);
    board_text("\n");
}

void board_exit(uint32_t status) {
    const uint32_t block[2] = {APPLICATION_EXIT, status};
    call_host(SYS_EXIT_EXTENDED, block);
    for (;;) {
    }
}

/* ---- measuring ---- */

uint32_t board_ticks(void) {
    return 0xFFFFFFFF - *at(0x40000004);
}

void board_calibrate(void) {
    uint32_t turns = 500000;
    const uint32_t start = board_ticks();
    __asm__ volatile("1: subs %0, #1\n bne 1b" : "+r"(turns) : : "cc");
    board_sum("ticks calibration", board_ticks() - start, 1);
}

uint32_t board_stack(void) {
    const volatile uint32_t *lowest = _bss_end;
    while (lowest < _stack_top && *lowest == (uint32_t)PAINT) lowest++;
    return (uint32_t)(_stack_top - lowest) * 4;
}
