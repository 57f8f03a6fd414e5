// zcrecord.rs behind the driver of tests/programs/c/fuzz.c: a static library with one function. A panic ends the process.

include!("checker.rs");

/// Opens, uses and checks an archive as the checker does; says whether it is one, and the CRC-32 of what it holds.
///
/// # Safety
///
/// `data` is `size` readable bytes, `crc` may be written.
#[no_mangle]
pub unsafe extern "C" fn fuzz_rust(data: *const u8, size: usize, mode: u8, level: u8, crc: *mut u32) -> i32 {
    let data = if size == 0 { &[][..] } else { std::slice::from_raw_parts(data, size) };
    match read(mode, level, data, false) {
        Err(_) => 0,
        Ok(text) => {
            *crc = zcrecord::crc32(text.as_bytes());
            1
        }
    }
}
