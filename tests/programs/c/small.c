/* Archives on a machine whose size_t, and int, has 16 bits: AVR. Prints what `everything` says of each question; on a
 * host as well, to compare.
 *
 * questions.h defines them, one after the other: two bytes of size, and that many bytes; a size of 0 ends them. They
 * come from flash, which is another address space on AVR, into RAM. */
#include <stddef.h>
#include <stdint.h>

#ifdef __AVR__
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/pgmspace.h>
#include <avr/sleep.h>

static void put(char c)
{
    UCSR0B = _BV(TXEN0);
    while (!(UCSR0A & _BV(UDRE0))) {
    }
    UDR0 = (uint8_t)c;
}

static void stop(void)
{
    cli();
    sleep_mode(); /* with interrupts off: that ends the simulation */
}
#else
#include <stdio.h>
#define PROGMEM
#define pgm_read_byte(p) (*(p))

static void put(char c)
{
    putchar(c);
}

static void stop(void)
{
}
#endif

#include "questions.h"

extern uint32_t everything(const void *data, size_t size, void *scratch, size_t scratch_size);

static uint8_t archive[5120] __attribute__((aligned(8)));
static uint32_t scratch[256];

int main(void)
{
    const uint8_t *next = questions;
    for (;;) {
        const size_t size = (size_t)(pgm_read_byte(next) | pgm_read_byte(next + 1) << 8);
        uint32_t answer;
        size_t i;
        int8_t shift;
        if (!size) break;
        for (i = 0; i < size; i++) archive[i] = pgm_read_byte(next + 2 + i);
        next += 2 + size;
        answer = everything(archive, size, scratch, sizeof scratch);
        for (shift = 28; shift >= 0; shift = (int8_t)(shift - 4)) put("0123456789abcdef"[(answer >> shift) & 15]);
        put('\n');
    }
    stop();
    return 0;
}
