// What a program of generated modules says of each constant: its address, alignment and bytes.

pub fn bytes_of<T: ?Sized>(value: &'static T) -> &'static [u8] {
    unsafe { std::slice::from_raw_parts(value as *const T as *const u8, std::mem::size_of_val(value)) }
}

/// Prints a constant: plan and number, address, what its type is aligned to, name, dtype, bits, shape, bytes.
pub fn show<T: ?Sized>(number: (u32, u32), value: Option<&'static T>, about: (&str, &str, u8), shape: &[u64]) {
    let bytes = value.map_or(&[][..], bytes_of);
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{:02x}", b)).collect::<String>();
    let at = value.map_or(0, |v| v as *const T as *const u8 as usize);
    let align = value.map_or(1, std::mem::align_of_val);
    let (name, dtype, bits) = about;
    let dims: Vec<String> = shape.iter().map(u64::to_string).collect();
    let (name, dims, bytes) = (hex(name.as_bytes()), dims.join(","), hex(bytes));
    println!("{} {} {at} {align} -{name} {dtype} {bits} -{dims} -{bytes}", number.0, number.1);
}
