// The checker of tests/support/readers.py's protocol over zcrecord.rs. Beyond what is asked, it uses everything the reader
// offers on every archive that opens, whatever its index says: a panic ends it, and so fails the test.
//
// `--terse` answers as if there were nothing in any archive; `--xxh3` reads u32 sizes and bytes instead, and writes
// their digests.

#[path = "../../../zcrecord/embed/zcrecord.rs"]
mod zcrecord;

use std::fmt::Write as _;
use std::io::{self, Read, Write};

use zcrecord::{Archive, Attribute, Child, Element, Error, Tensor, Value};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut input = Vec::new();
    io::stdin().lock().read_to_end(&mut input).expect("standard input");
    let mut out = io::BufWriter::new(io::stdout().lock());
    let digests = arguments.iter().any(|a| a == "--xxh3");
    let shown = arguments.iter().any(|a| a == "--dump");
    let terse = arguments.iter().any(|a| a == "--terse");
    let elements = arguments.iter().any(|a| a == "--elements");
    let mut rest = &input[..];
    while !rest.is_empty() {
        if digests {
            writeln!(out, "{:016x}", zcrecord::xxh3(sized(&mut rest))).expect("standard output");
            continue;
        }
        let (mode, level, names) = (rest[0], rest[1], u16::from_le_bytes([rest[2], rest[3]]));
        rest = &rest[4..];
        let data = sized(&mut rest);
        let names: Vec<&str> = (0..names).map(|_| std::str::from_utf8(sized(&mut rest)).expect("a name")).collect();
        let answer = match level {
            _ if elements => elements_of(mode, data),
            b't' => look_up(mode, data, &names),
            _ => read(mode, level, data, terse),
        };
        tell(&mut out, answer, shown).expect("standard output");
    }
}

/// Takes a u32 and so many bytes off the input.
fn sized<'i>(rest: &mut &'i [u8]) -> &'i [u8] {
    let end = 4 + u32::from_le_bytes(rest[..4].try_into().expect("a size")) as usize;
    let (data, others) = (&rest[4..end], &rest[end..]);
    *rest = others;
    data
}

fn tell(out: &mut impl Write, answer: Result<String, String>, shown: bool) -> io::Result<()> {
    match answer {
        Err(why) => writeln!(out, "refused {why}"),
        Ok(text) => {
            writeln!(out, "accepted {:08x}", zcrecord::crc32(text.as_bytes()))?;
            if shown {
                writeln!(out, "{text}")?;
            }
            Ok(())
        }
    }
}

fn open(mode: u8, data: &[u8]) -> Result<Archive<'_>, String> {
    let opened = match mode {
        b'w' => Archive::open(data),
        b'p' => Archive::open_prefix(data),
        _ => Archive::open_suffix(data),
    };
    opened.map_err(|e| e.to_string())
}

/// The elements of all tensors in C order, and by values where they are of a type that the reader knows.
fn elements_of(mode: u8, data: &[u8]) -> Result<String, String> {
    let archive = open(mode, data)?;
    let mut out = String::new();
    for tensor in archive.iter() {
        let tensor = tensor.map_err(|e| e.to_string())?;
        use_tensor(&tensor).map_err(|e| e.to_string())?;
        (0..tensor.count()).for_each(|i| out.push_str(&hex(tensor.element(i).expect("an element"))));
    }
    Ok(out)
}

/// Looks each name up in an archive that is opened for it.
fn look_up(mode: u8, data: &[u8], names: &[&str]) -> Result<String, String> {
    open(mode, data)?;
    let mut out = String::new();
    for name in names {
        match open(mode, data)?.get(name) {
            Ok(tensor) => put_tensor(&mut out, &tensor),
            Err(Error::NotFound) => out.push_str("-\n"),
            Err(_) => out.push_str("refused\n"),
        }
    }
    Ok(out)
}

fn read(mode: u8, level: u8, data: &[u8], terse: bool) -> Result<String, String> {
    let archive = open(mode, data)?;
    let small = data.len() < 1 << 16; // a name that a million tensors share costs as much, unverified, as it says
    if small {
        let _ = use_all(&archive); // any error will do
    }
    let mut scratch = vec![0; archive.scratch_words()];
    let verified = match level {
        b'o' => return Ok(String::new()),
        b'i' => archive.verify(&mut scratch),
        _ => archive.verify_payloads(&mut scratch),
    };
    verified.map_err(|e| e.to_string())?;
    if let Some(less) = archive.scratch_words().checked_sub(1) {
        assert_eq!(archive.verify(&mut scratch[..less]), Err(Error::ScratchTooSmall));
    }
    if small {
        use_all(&archive).expect("nothing fails in a verified archive");
    }
    if terse {
        return Ok(String::new());
    }
    Ok(dump(&archive).expect("nothing fails in a verified archive"))
}

/// Uses whatever the reader offers; in a verified archive nothing may fail, and all ways to one thing agree.
fn use_all(archive: &Archive) -> Result<(), Error> {
    let mut result = Ok(());
    let mut note = |error: Error| result = Err(error);
    let mut verified_places = 0u64;
    for (number, tensor) in archive.iter().enumerate() {
        match tensor {
            Ok(tensor) => {
                assert_eq!(tensor.number() as usize, number);
                use_tensor(&tensor).unwrap_or_else(&mut note);
                match archive.get(tensor.name()) {
                    Ok(found) if found.number() == tensor.number() => {}
                    Ok(_) => note(Error::NameOrder),
                    Err(error) => note(error),
                }
            }
            Err(error) => note(error),
        }
    }
    for name in ["", "\0", "no such name", "\u{10FFFF}", "w", "a.b.c"] {
        if let (Ok(tensor), Ok(again)) = (archive.get(name), archive.get(name)) {
            assert_eq!((tensor.name(), tensor.number()), (name, again.number()));
        }
        let _ = (archive.find_module(name), archive.metadata_value(name).is_ok());
    }
    for name in archive.names() {
        if let Err(error) = name {
            note(error);
        }
    }
    for module in archive.modules() {
        match module.and_then(|module| use_module(archive, &module)) {
            Ok(children) => verified_places += children,
            Err(error) => note(error),
        }
    }
    for attribute in archive.attributes().chain(archive.metadata()) {
        attribute.and_then(|a| use_value(&a)).unwrap_or_else(&mut note);
    }
    for item in archive.metadata() {
        item.and_then(|a| archive.metadata_value(a.name())).map(drop).unwrap_or_else(&mut note);
    }
    let children = u64::from(archive.tensor_count()) + u64::from(archive.attribute_count());
    let all = children + u64::from(archive.module_count()) - 1;
    if verified_places != all {
        note(Error::Places);
    }
    result
}

fn use_tensor(tensor: &Tensor) -> Result<(), Error> {
    let shape: Vec<u64> = tensor.shape().collect();
    assert_eq!((shape.len(), shape.iter().product::<u64>()), (tensor.rank(), tensor.count()));
    assert!(tensor.name().ends_with(tensor.key()) && format!("{tensor:?}").starts_with("Tensor("));
    assert_eq!(tensor.value::<f32>(tensor.count()), None);
    assert_eq!((tensor.element(tensor.count()), tensor.packed(tensor.count())), (None, None));
    assert_eq!(tensor.index(&vec![u64::MAX; tensor.rank() + 1]), None);
    if tensor.count() > 0 {
        let last: Vec<u64> = shape.iter().map(|dim| dim - 1).collect();
        assert_eq!(tensor.index(&last), Some(tensor.count() - 1));
    }
    match tensor.bytes() {
        Ok(bytes) => assert_eq!(bytes.len() as u64, tensor.nbytes()),
        Err(error) => assert_eq!((error, tensor.is_contiguous()), (Error::Strided, false)),
    }
    let few = tensor.count().min(50);
    for index in 0..few {
        match tensor.bits() {
            0 => drop(tensor.string(index)), // its ends are the payload's: not checked below level f
            1..=7 => assert!(u32::from(tensor.packed(index).expect("an element")) < 1 << tensor.bits()),
            bits if bits % 8 == 0 => {
                let element = tensor.element(index).expect("an element");
                assert_eq!(element.len(), usize::from(bits / 8));
                if let Ok(bytes) = tensor.bytes() {
                    assert_eq!(element.as_ptr() as usize - bytes.as_ptr() as usize, index as usize * element.len());
                }
            }
            _ => assert_eq!(tensor.element(index), None),
        }
    }
    let read = [
        agree::<u8>(tensor, few), agree::<i8>(tensor, few), agree::<u16>(tensor, few), agree::<i16>(tensor, few),
        agree::<u32>(tensor, few), agree::<i32>(tensor, few), agree::<u64>(tensor, few), agree::<i64>(tensor, few),
        agree::<f32>(tensor, few), agree::<f64>(tensor, few), agree::<[f32; 2]>(tensor, few),
        agree::<[f64; 2]>(tensor, few),
    ];
    let plain = tensor.bits() >= 8 && tensor.dtype().bits().is_some();
    assert!(read.iter().filter(|&&r| r).count() == usize::from(plain) || tensor.dtype().bits().is_none());
    Ok(())
}

/// Whether the tensor's elements are read as `T`; then values and elements are the same bytes.
fn agree<T: Element + Bits>(tensor: &Tensor, few: u64) -> bool {
    match tensor.values::<T>() {
        Err(error) => {
            assert_eq!((error, tensor.value::<T>(0).is_none()), (Error::WrongType, true));
            false
        }
        Ok(values) => {
            assert_eq!(values.size_hint(), (tensor.count() as usize, Some(tensor.count() as usize)));
            for (index, value) in values.take(few as usize).enumerate() {
                let element = tensor.element(index as u64).expect("an element");
                assert_eq!(value.bytes(), element);
                assert_eq!(tensor.value::<T>(index as u64).expect("an element").bytes(), element);
            }
            true
        }
    }
}

trait Bits {
    fn bytes(&self) -> Vec<u8>;
}

macro_rules! bits {
    ($($type:ty)*) => {$(
        impl Bits for $type {
            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        }
    )*};
}

bits!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

impl<T: Bits> Bits for [T; 2] {
    fn bytes(&self) -> Vec<u8> {
        self.iter().flat_map(Bits::bytes).collect()
    }
}

/// Uses a module and its children; returns how many there are.
fn use_module(archive: &Archive, module: &zcrecord::Module) -> Result<u64, Error> {
    let count = archive.child_count(module) as usize;
    assert!(count as u64 <= u64::from(u32::MAX));
    if count > 1 << 20 {
        return Err(Error::Places); // as only an unverified archive of the tests says
    }
    let mut scratch = vec![0; count];
    if let Some(less) = count.checked_sub(1) {
        assert_eq!(archive.children(module, &mut scratch[..less]).map(drop), Err(Error::ScratchTooSmall));
    }
    let mut seen = 0;
    for (place, child) in archive.children(module, &mut scratch)?.enumerate() {
        let (at, parent, key) = match child? {
            Child::Tensor(t) => (t.place(), Some(t.parent()), t.key()),
            Child::Module(m) => (m.place(), m.parent(), m.key()),
            Child::Attribute(a) => {
                if place < 50 {
                    assert_eq!(archive.attribute(module, a.name())?.name(), a.name()); // linear
                }
                (a.place(), a.parent(), a.name())
            }
        };
        if (at as usize, parent) != (place, Some(module.number())) || key.is_empty() {
            return Err(Error::Places);
        }
        seen += 1;
    }
    if module.name() != archive.find_module(module.name())?.name() {
        return Err(Error::ModuleTwice);
    }
    let _ = format!("{module:?}");
    Ok(seen)
}

fn use_value(attribute: &Attribute) -> Result<(), Error> {
    if let Value::List(items) | Value::Tuple(items) = attribute.value() {
        assert_eq!(items.size_hint().0, items.count());
        for item in items.take(1000) {
            item?;
        }
    }
    Ok(())
}

// The text that tests/support/readers.py describes.

fn hex(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "-".to_owned();
    }
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("memory");
        text
    })
}

fn numbers<T: ToString>(values: impl Iterator<Item = T>) -> String {
    let texts: Vec<String> = values.map(|v| v.to_string()).collect();
    if texts.is_empty() {
        "-".to_owned()
    } else {
        texts.join(",")
    }
}

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}

fn dump(archive: &Archive) -> Result<String, Error> {
    let counts = [archive.tensor_count(), archive.module_count(), archive.attribute_count(), archive.metadata_count()];
    let counts = counts.map(|c| c.to_string()).join(" ");
    let (alignment, base, size) = (archive.alignment(), archive.base_alignment(), archive.data().len());
    let mut out = format!("archive {alignment} {base} {size} {counts}\n");
    for tensor in archive.iter() {
        put_tensor(&mut out, &tensor?);
    }
    for module in archive.modules() {
        let m = module?;
        let (name, type_name) = (hex(m.name().as_bytes()), hex(m.type_name().as_bytes()));
        let what = format!("{name} {} {type_name} {} {}", m.kind().0, or_dash(m.parent()), m.end());
        writeln!(out, "module {what} {} {}", m.place(), m.key().len()).expect("memory");
    }
    for (kind, rows) in [("attribute", archive.attributes()), ("metadata", archive.metadata())] {
        for attribute in rows {
            let a = attribute?;
            let (form, shown) = match a.value() {
                Value::List(items) => (1, words(items)?),
                Value::Tuple(items) => (2, words(items)?),
                one => (0, word(one)),
            };
            let what = format!("{} {} {}", or_dash(a.parent()), a.place(), hex(a.name().as_bytes()));
            writeln!(out, "{kind} {what} {} {form} {shown}", a.value_type()).expect("memory");
        }
    }
    Ok(out)
}

fn put_tensor(out: &mut String, t: &Tensor) {
    let strides = t.strides().map_or_else(|| "c".to_owned(), numbers);
    let (name, dims, at) = (hex(t.name().as_bytes()), numbers(t.shape()), or_dash(t.offset()));
    let (nbytes, crc) = (t.payload().len(), if t.offset().is_some() { zcrecord::crc32(t.payload()) } else { 0 });
    let what = format!("{name} {} {} {dims} {strides} {at} {nbytes} {crc:08x}", t.dtype().0, t.bits());
    writeln!(out, "tensor {what} {} {} {}", t.parent(), t.place(), t.name().len() - at_key(t)).expect("memory");
}

fn at_key(tensor: &Tensor) -> usize {
    tensor.name().len() - tensor.key().len()
}

fn words(items: zcrecord::Items) -> Result<String, Error> {
    let shown: Result<Vec<String>, Error> = items.map(|item| item.map(word)).collect();
    Ok(numbers(shown?.into_iter()))
}

fn word(value: Value) -> String {
    match value {
        Value::Nil => "0".to_owned(),
        Value::Bool(on) => u8::from(on).to_string(),
        Value::Int(i) => (i as u64).to_string(),
        Value::Uint(u) => u.to_string(),
        Value::Float(f) => f.to_bits().to_string(),
        Value::Text(text) => hex(text.as_bytes()),
        Value::Bytes(bytes) => bytes.len().to_string(),
        Value::List(_) | Value::Tuple(_) => unreachable!("items are words"),
    }
}
