//! A reader of tests/conformance in Rust, by zcrecord.rs: rustc --edition 2021 tests/conformance/readers/reader.rs

#[path = "../../../zcrecord/embed/zcrecord.rs"]
mod zcrecord;

use std::io::{self, BufRead, Write};

use zcrecord::{Archive, Attribute, Child, Error, Module, Tensor, Value};

fn text(value: &str) -> String {
    let mut out = String::from('"');
    for c in value.chars() {
        match c {
            '"' | '\\' | '\0'..='\x1f' => out += &format!("\\u{:04x}", c as u32),
            _ => out.push(c),
        }
    }
    out + "\""
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A list of integers as texts, since JSON's numbers lose some of 64 bits.
fn numbers<T: ToString>(values: impl Iterator<Item = T>) -> String {
    list(values.map(|value| text(&value.to_string())))
}

fn list(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(", "))
}

fn tensor(t: &Tensor) -> String {
    let elements = match t.bytes() {
        Ok(bytes) => hex(bytes),
        Err(_) => (0..t.count()).filter_map(|i| t.element(i)).map(hex).collect(), // strided
    };
    format!(
        r#""name": {}, "dtype": {}, "bits": {}, "shape": {}, "strides": {}, "offset": {}, "nbytes": {}, "elements": "{}""#,
        text(t.name()),
        t.dtype().0,
        t.bits(),
        numbers(t.shape()),
        t.strides().map_or("null".to_owned(), numbers),
        t.offset().map_or("null".to_owned(), |at| at.to_string()),
        t.nbytes(),
        elements
    )
}

fn value(one: Value) -> String {
    match one {
        Value::Nil => "null".to_owned(),
        Value::Bool(on) => on.to_string(),
        Value::Int(i) => text(&i.to_string()),
        Value::Uint(u) => text(&u.to_string()),
        Value::Float(f) => text(&format!("{:016x}", f.to_bits())),
        Value::Text(t) => text(t),
        Value::Bytes(bytes) => text(&hex(bytes)),
        Value::List(_) | Value::Tuple(_) => unreachable!("items are words"),
    }
}

fn attribute(a: &Attribute) -> Result<String, Error> {
    let (form, values) = match a.value() {
        Value::List(items) => (1, items.collect::<Result<Vec<_>, _>>()?),
        Value::Tuple(items) => (2, items.collect::<Result<Vec<_>, _>>()?),
        one => (0, vec![one]),
    };
    let values = list(values.into_iter().map(value));
    Ok(format!(r#""key": {}, "type": {}, "form": {form}, "values": {values}"#, text(a.name()), a.value_type()))
}

fn module(archive: &Archive, m: &Module) -> Result<String, Error> {
    let mut scratch = vec![0; archive.child_count(m) as usize];
    let mut children = Vec::new();
    for child in archive.children(m, &mut scratch)? {
        children.push(match child? {
            Child::Tensor(t) => text(t.key()),
            Child::Module(m) => text(m.key()),
            Child::Attribute(a) => text(a.name()),
        });
    }
    let (name, kind, type_name) = (text(m.name()), m.kind().0, text(m.type_name()));
    let children = list(children.into_iter());
    Ok(format!(r#"{{"name": {name}, "kind": {kind}, "type_name": {type_name}, "children": {children}}}"#))
}

fn contents(archive: &Archive) -> Result<String, Error> {
    let (mut tensors, mut modules, mut attributes, mut metadata) = (vec![], vec![], vec![], vec![]);
    let name_of = |number| archive.module(number).map(|m| text(m.name()));
    for t in archive.iter() {
        let t = t?;
        tensors.push(format!(r#"{{{}, "module": {}}}"#, tensor(&t), name_of(t.parent())?));
    }
    for m in archive.modules() {
        modules.push(module(archive, &m?)?);
    }
    for a in archive.attributes() {
        let a = a?;
        attributes.push(format!(r#"{{"module": {}, {}}}"#, name_of(a.parent().unwrap_or(0))?, attribute(&a)?));
    }
    for a in archive.metadata() {
        metadata.push(format!("{{{}}}", attribute(&a?)?));
    }
    let parts = [("tensors", tensors), ("modules", modules), ("attributes", attributes), ("metadata", metadata)];
    Ok(parts.into_iter().map(|(name, rows)| format!(r#", "{name}": {}"#, list(rows.into_iter()))).collect())
}

fn refusal(error: Error) -> String {
    format!(r#"{{"accepted": false, "rule": "R{}", "message": {}}}"#, error.rule(), text(error.what()))
}

fn answer(level: &str, embedded: &str, data: &[u8], names: &[&str]) -> Result<String, Error> {
    let archive = match embedded {
        "prefix" => Archive::open_prefix(data)?,
        "suffix" => Archive::open_suffix(data)?,
        _ => Archive::open(data)?,
    };
    let mut scratch = vec![0; archive.scratch_words()];
    match level {
        "index" => archive.verify(&mut scratch)?,
        "full" => archive.verify_payloads(&mut scratch)?,
        _ => {
            let found = names.iter().map(|name| match archive.get(name) {
                Ok(t) => format!("{{{}}}", tensor(&t)),
                Err(Error::NotFound) => "null".to_owned(),
                Err(error) => refusal(error),
            });
            return Ok(format!(r#"{{"accepted": true, "tensors": {}}}"#, list(found)));
        }
    }
    Ok(format!(r#"{{"accepted": true{}}}"#, contents(&archive)?))
}

fn main() -> io::Result<()> {
    for line in io::stdin().lock().split(b'\n') {
        let line = String::from_utf8(line?).expect("UTF-8"); // `lines` takes a CR off
        let fields: Vec<&str> = line.split('\t').collect();
        let data = std::fs::read(fields[2])?;
        println!("{}", answer(fields[0], fields[1], &data, &fields[3..]).unwrap_or_else(refusal));
        io::stdout().flush()?;
    }
    Ok(())
}
