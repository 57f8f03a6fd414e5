/* What this board gives a program: text to the host, a clock that counts instructions, and how much stack was used.

   The board is QEMU's mps2-an385, a Cortex-M3. On another one board.c and board.ld are what changes. */

#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

/* Instructions in one tick: the timer runs at 25 MHz, and under `-icount shift=0` an instruction takes 1 ns. */
enum { INSTRUCTIONS_PER_TICK = 40 };

void board_text(const char *text);
void board_decimal(uint32_t value);
void board_hex(uint32_t value);

/* A line of `name value`, and one of `name value count`: a sum, and over how many. */
void board_value(const char *name, uint32_t value);
void board_sum(const char *name, uint32_t value, uint32_t count);

/* Ticks since start, modulo 2^32: 171 seconds, 171 thousand million instructions. */
uint32_t board_ticks(void);

/* Count the ticks of a loop of 1,000,000 instructions and report both: whoever reads the counts checks the clock. */
void board_calibrate(void);

/* The most bytes of stack in use since start. */
uint32_t board_stack(void);

/* End the program; the status becomes QEMU's own. */
_Noreturn void board_exit(uint32_t status);

/* The program. What it returns is its status. */
int main(void);

#endif
