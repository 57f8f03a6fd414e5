// The reader on a machine without anything: no std, no allocator, and a panic handler that nothing links.
//
// Every path that could panic would need `zcrecord_panicked`, which does not exist. So a program that links at all,
// with what it does not reach dropped, has shown that none can.

#![no_std]

#[path = "../../../zcrecord/embed/zcrecord.rs"]
mod zcrecord;

use core::panic::PanicInfo;
use zcrecord::{Archive, Child, Element, Error, Value};

extern "C" {
    fn zcrecord_panicked() -> !;
}

#[panic_handler]
fn panicked(_: &PanicInfo) -> ! {
    unsafe { zcrecord_panicked() }
}

/// Opens, verifies and reads all there is; returns the broken rule, or a sum over everything plus 1000.
///
/// # Safety
/// `data` points to `size` bytes, `scratch` to `words` words.
#[no_mangle]
pub unsafe extern "C" fn read_all(data: *const u8, size: usize, scratch: *mut u32, words: usize, level: i32) -> u64 {
    let data = core::slice::from_raw_parts(data, size);
    let scratch = core::slice::from_raw_parts_mut(scratch, words);
    #[cfg(can_panic)]
    let level = level + i32::from(data[words]);
    match sum(data, scratch, level) {
        Ok(sum) => sum.wrapping_add(1000),
        Err(error) => u64::from(error.rule()),
    }
}

fn sum(data: &[u8], scratch: &mut [u32], level: i32) -> Result<u64, Error> {
    let archive = match level {
        0 => Archive::open_prefix(data)?,
        1 => Archive::open_suffix(data)?,
        _ => Archive::open(data)?,
    };
    if level > 3 {
        archive.verify_payloads(scratch)?;
    } else if level > 2 {
        archive.verify(scratch)?;
    }
    let mut sum = 0u64;
    let mut add = |value: u64| sum = sum.wrapping_add(value);
    for name in archive.names() {
        let t = archive.get(name?)?;
        t.shape().for_each(&mut add);
        t.strides().into_iter().flatten().for_each(|s| add(s as u64));
        add(t.bytes().map_or(0, |b| b.len() as u64));
        (0..t.count()).for_each(|i| add(u64::from(t.packed(i).unwrap_or(0))));
        (0..t.count()).for_each(|i| add(t.string(i).map_or(0, |s| s.len() as u64)));
        (0..t.count()).for_each(|i| add(t.element(i).map_or(0, |e| e.len() as u64)));
        add(t.index(&[1, 2]).unwrap_or(0));
        t.values::<f32>().into_iter().flatten().for_each(|x| add(u64::from(x.to_bits())));
        t.values::<u8>().into_iter().flatten().for_each(|x| add(u64::from(x)));
        t.values::<[f64; 2]>().into_iter().flatten().for_each(|x| add(x[1].to_bits()));
        add(u64::from(u16::is(t.dtype(), t.bits())));
        add(t.key().len() as u64);
    }
    for module in archive.modules() {
        let module = module?;
        add(archive.find_module(module.name())?.key().len() as u64);
        for child in archive.children(&module, scratch)? {
            match child? {
                Child::Tensor(t) => add(u64::from(t.place())),
                Child::Module(m) => add(u64::from(m.place())),
                Child::Attribute(a) => add(archive.attribute(&module, a.name())?.name().len() as u64),
            }
        }
    }
    for found in archive.metadata().chain(archive.attributes()) {
        let found = found?;
        add(archive.metadata_value(found.name()).is_ok().into());
        match found.value() {
            Value::List(items) | Value::Tuple(items) => items.for_each(|item| add(item.is_ok().into())),
            Value::Text(text) => add(text.len() as u64),
            Value::Bytes(bytes) => add(bytes.len() as u64),
            Value::Int(i) => add(i as u64),
            _ => add(1),
        }
    }
    Ok(sum)
}
