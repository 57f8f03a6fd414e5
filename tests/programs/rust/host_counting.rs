//! Counts what a program asks of the heap, and reports as tests/programs/c/host_counting.c does.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every request goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        BYTES.fetch_add(layout.size(), Relaxed);
        System.alloc(layout)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        System.dealloc(pointer, layout)
    }
}

/// Forgets what has been allocated so far: a Rust program's start allocates.
pub fn count_from() {
    ALLOCATIONS.store(0, Relaxed);
    BYTES.store(0, Relaxed);
}

/// Prints what was allocated since, where the weights lie, and the sum; then waits for the end of standard input.
pub fn report(address: usize, nbytes: usize, sum: f64) {
    let (allocations, bytes) = (ALLOCATIONS.load(Relaxed), BYTES.load(Relaxed));
    println!(
        "{{\"allocations\": {allocations}, \"bytes\": {bytes}, \"address\": {address}, \"nbytes\": {nbytes}, \
         \"sum\": {sum:?}}}"
    );
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
